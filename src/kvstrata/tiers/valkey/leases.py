"""Leases on ordinary servers: `SET NX PX`, and scripts that renew and release only what is still ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstrata.tiers.lease import Claim, Lease
from kvstrata.tiers.tier import Address
from kvstrata.tiers.valkey.errors import ReplyError, ServerAvoidedError
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.resp import Command, Reply, script

_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class LeaseServers(Protocol):
    """What leases need of a tier's servers."""

    def owner(self, segment: bytes) -> str | None:
        """The server for small calls about a segment; None where none can be asked."""

    def execute(self, name: str, commands: Sequence[Command]) -> list[Reply]:
        """Send commands to a server in one pipelined round trip; their replies. Raises ServerError."""


class ValkeyLeases:
    """A `LeaseStore` on the servers of a tier, each lease on the one that its segment's blocks are on."""

    def __init__(self, servers: LeaseServers, names: Names) -> None:
        self._servers = servers
        self._names = names

    def claim(
        self, leases: Sequence[Lease], seconds: float, watched: Sequence[Sequence[bytes]]
    ) -> list[Claim]:
        """See `LeaseStore`. Raises ServerError."""
        commands: list[list[Command]] = []
        for lease, names in zip(leases, watched, strict=True):
            own = self._name(lease.segment, lease.name)
            others = [self._name(lease.segment, name) for name in names]
            commands.append(
                [
                    ("SET", own, lease.value, "NX", "PX", _milliseconds(seconds)),
                    ("MGET", own, *others),
                    ("EXISTS", self._names.block(Address(lease.name, 0), lease.segment)),
                ]
            )
        claims = []
        for replies in self._execute(leases, commands):
            won, values, stored = replies
            if isinstance(won, ReplyError) or not isinstance(values, list):
                raise ServerAvoidedError(str(won if isinstance(won, ReplyError) else values))
            claims.append(
                Claim(won is not None, tuple(v for v in values if isinstance(v, bytes)), stored == 1)
            )
        return claims

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[bool]:
        """See `LeaseStore`. Raises ServerError."""
        return self._compared(_RENEW, leases, (_milliseconds(seconds),))

    def release(self, leases: Sequence[Lease]) -> list[bool]:
        """See `LeaseStore`. Raises ServerError."""
        return self._compared(_RELEASE, leases, ())

    def _compared(self, text: str, leases: Sequence[Lease], arguments: tuple[int, ...]) -> list[bool]:
        commands: list[list[Command]] = [
            [script(text, [self._name(lease.segment, lease.name)], [lease.value, *arguments])]
            for lease in leases
        ]
        return [reply == 1 for [reply] in self._execute(leases, commands)]

    def _execute(self, leases: Sequence[Lease], commands: Sequence[Sequence[Command]]) -> list[list[Reply]]:
        """Replies to each lease's commands, one pipelined round trip to each server."""
        by_server: dict[str, list[int]] = {}
        for number, lease in enumerate(leases):
            server = self._servers.owner(lease.segment)
            if server is None:
                raise ServerAvoidedError("no server can be asked")
            by_server.setdefault(server, []).append(number)
        replies: list[list[Reply]] = [[] for _ in leases]
        for server, numbers in by_server.items():
            answers = iter(
                self._servers.execute(server, [one for number in numbers for one in commands[number]])
            )
            for number in numbers:
                replies[number] = [next(answers) for _ in commands[number]]
        return replies

    def _name(self, segment: bytes, name: bytes) -> bytes:
        return self._names.lease(segment) + b":" + name.hex().encode()


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e3))
