"""Where a Valkey Cluster keeps things: its own slots, asked for now and then.

A name's slot is CRC16 of its hash tag, the segment in hexadecimal, so a segment's blocks lie together. A key
that has moved since is a miss until the slots are asked for again, which is soon.
"""

from __future__ import annotations

from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.tiers.valkey.resp import Reply
from kvstrata.tiers.valkey.settings import Server

SLOTS = 16384


@dataclass(frozen=True)
class SlotRange:
    """Slots `first` to `last` and the primary that has them."""

    first: int
    last: int
    primary: Server


class Slots:
    """A placement by slots. Primaries only: a cluster has its own way to replace one that is down."""

    def __init__(self, ranges: Sequence[SlotRange]) -> None:
        self.ranges = tuple(sorted(ranges, key=lambda each: each.first))
        self._firsts = [each.first for each in self.ranges]

    def owners(self, name: bytes, count: int) -> tuple[str, ...]:
        """The primary of a segment's slot; nobody where the cluster has none for it."""
        slot = slot_of(name.hex().encode())
        at = bisect_right(self._firsts, slot) - 1
        if at < 0 or self.ranges[at].last < slot or count < 1:
            return ()
        return (self.ranges[at].primary.name,)


def slot_of(tag: bytes) -> int:
    """The slot of a hash tag, by the cluster specification: CRC16 (XMODEM) modulo 16384."""
    return crc_hqx(tag, 0) % SLOTS


def parse_slots(reply: Reply, asked: Server) -> Slots | None:
    """The placement in a reply to CLUSTER SLOTS; None where it is none. asked: who gave it, for an address
    that is left out because it is its own.
    """
    if not isinstance(reply, list):
        return None
    ranges = []
    for row in reply:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_]:
                name = host.decode() if isinstance(host, bytes) and host else asked.host
                ranges.append(SlotRange(first, last, Server(name, port)))
            case _:
                return None
    return Slots(ranges) if ranges else None
