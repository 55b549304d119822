"""Records as values: received straight into the memory they are for, and sent from where they lie.

A value is a record's header and its payload, as on disk. Verification is the disk tier's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstrata.tiers.lifetime import Clocks, Lifetime
from kvstrata.tiers.record import (
    RecordHeader,
    check_identity,
    check_payload,
    decode_header,
    encode_header,
    fits,
    header_bytes,
)
from kvstrata.tiers.refresh import prolongs
from kvstrata.tiers.tier import DropReason, Identity, Loaded, MissReason, Record, StoreContext
from kvstrata.tiers.valkey.connection import Connection
from kvstrata.tiers.valkey.errors import ReplyError
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.resp import Argument, Command, Reply
from kvstrata.tiers.valkey.settings import ValkeySettings

LEAST_RATE = 20e6  # bytes a second: what is slower is not waited for
_NOT_THERE, _FOR_EVER = -2, -1  # replies to PTTL
_SENT_AT_ONCE = 1 << 20  # bytes
_ASKED_AT_ONCE = 256  # values whose names are sent before the first is read


@dataclass(frozen=True)
class Wanted:
    """A block to be loaded. into: uint8 `[payload_bytes]`."""

    number: int
    name: bytes
    identity: Identity
    into: memoryview


@dataclass(frozen=True)
class Outgoing:
    """A block to be stored."""

    number: int
    name: bytes
    record: Record


class Values:
    """Moves records of one model between its servers and memory; any thread may use it."""

    def __init__(self, context: StoreContext, settings: ValkeySettings, clocks: Clocks) -> None:
        self._context = context
        self._settings = settings
        self._clocks = clocks
        self._header_bytes = header_bytes(context.block_size)

    def load(self, node: Node, wanted: Sequence[Wanted], done: Callable[[int, Loaded], None]) -> None:
        """Read values of one server in one pipelined round trip, and tell the outcome of each as it comes.

        Raises ServerError; what was not told until then is not there, and no memory is touched any more.
        """
        begin, nbytes = time.monotonic(), 0
        due = self.due(sum(len(each.into) for each in wanted))
        scratch = bytearray(self._header_bytes)
        with node.transfer(due) as connection:
            connection.begin(due, self._settings.stall)
            for first in range(0, len(wanted), _ASKED_AT_ONCE):
                some = wanted[first : first + _ASKED_AT_ONCE]
                connection.send([("GET", each.name) for each in some])
                for each in some:
                    length = connection.reader.bulk_length()
                    if not isinstance(length, int):
                        done(each.number, Loaded("absent" if length is None else _miss(length)))
                        continue
                    if length != self._header_bytes + len(each.into):
                        connection.reader.pass_over(length)
                        connection.reader.end_bulk()
                        done(each.number, Loaded("length"))
                        continue
                    connection.reader.take(memoryview(scratch))
                    connection.reader.take(each.into)
                    connection.reader.end_bulk()
                    nbytes += length
                    done(each.number, self._verified(scratch, each))
        with node.lock:
            node.figures.loaded_bytes += nbytes
            node.figures.load_seconds += time.monotonic() - begin

    def store(
        self, node: Node, outgoing: Sequence[Outgoing], done: Callable[[int, DropReason | None], None]
    ) -> None:
        """Send values to one server, those that it lacks, and tell the outcome of each.

        Raises ServerError; what was not told until then may have been kept or not.
        """
        begin, nbytes = time.monotonic(), 0
        due = self.due(sum(len(each.record.payload) for each in outgoing))
        with node.transfer(due) as connection:
            connection.begin(due, self._settings.stall)
            connection.send([("PTTL", each.name) for each in outgoing])
            there = [connection.reply() for _ in outgoing]
            fresh = []
            for each, answer in zip(outgoing, there, strict=True):
                if self._lasts(answer, each.record):
                    done(each.number, None)
                elif fits(each.record.identity, self._header_bytes):
                    fresh.append(each)
                else:
                    done(each.number, "too_big")
            for each in self._send(connection, fresh, done):
                answer = connection.reply()
                if not isinstance(answer, ReplyError):
                    nbytes += len(each.record.payload)
                done(each.number, drop_of(answer) if isinstance(answer, ReplyError) else None)
        with node.lock:
            node.figures.stored_bytes += nbytes
            node.figures.store_seconds += time.monotonic() - begin

    def _send(
        self,
        connection: Connection,
        fresh: Sequence[Outgoing],
        done: Callable[[int, DropReason | None], None],
    ) -> list[Outgoing]:
        """Send values, some at a time: checksums of the next are computed while the server reads these."""
        sent: list[Outgoing] = []
        commands: list[Command] = []
        waiting = 0
        for each in fresh:
            command = self._set(each)
            if command is None:  # it has expired on its way
                done(each.number, None)
                continue
            sent.append(each)
            commands.append(command)
            waiting += len(each.record.payload)
            if waiting >= _SENT_AT_ONCE:
                connection.send(commands)
                commands, waiting = [], 0
        if commands:
            connection.send(commands)
        return sent

    def due(self, nbytes: int) -> float:
        """When moving so many bytes is given up, by the monotonic clock."""
        return time.monotonic() + self._settings.stall + nbytes / LEAST_RATE

    def _deadline(self, record: Record) -> float:
        life = self._settings.ttl * (1 - record.meta.spread)
        return min(record.meta.deadline, self._clocks.monotonic() + life)

    def _lasts(self, answer: Reply, record: Record) -> bool:
        """Whether a value is there, by what PTTL says, and storing it anew would not prolong its life."""
        if not isinstance(answer, int) or answer == _NOT_THERE:
            return False
        now = self._clocks.monotonic()
        ends = math.inf if answer == _FOR_EVER else now + answer / 1e3
        return not prolongs(ends, self._deadline(record), now)

    def _set(self, each: Outgoing) -> Command | None:
        record = each.record
        lifetime = Lifetime.until(self._deadline(record), self._clocks)
        header = encode_header(
            self._context.fingerprint,
            record.identity,
            record.meta,
            record.payload,
            serial=int(lifetime.written * 1e6),
            lifetime=lifetime,
            size=self._header_bytes,
            signing_key=self._settings.signing_key,
        )
        value: tuple[Argument, ...] = ("SET", each.name, (header, record.payload))
        if lifetime.remaining == math.inf:
            return value
        milliseconds = int(lifetime.remaining * 1e3)
        return (*value, "PX", milliseconds) if milliseconds > 0 else None

    def _verified(self, raw: bytearray, each: Wanted) -> Loaded:
        """What was loaded is what was wanted, or why it is not."""
        header = decode_header(memoryview(raw))
        if not isinstance(header, RecordHeader):
            return Loaded(header)
        wrong = check_identity(
            header, self._context.fingerprint, each.identity, len(each.into)
        ) or check_payload(header, memoryview(raw), each.into, self._settings.signing_key)
        if wrong is not None:
            return Loaded(wrong)
        deadline = header.lifetime.deadline(self._clocks)
        if deadline <= self._clocks.monotonic():
            return Loaded("expired")
        return Loaded(None, deadline, header.meta(deadline=deadline))


def _miss(error: ReplyError) -> MissReason:
    return "magic" if error.code == "WRONGTYPE" else "unavailable"


def drop_of(error: ReplyError) -> DropReason:
    """Why a server did not keep a value."""
    return {"OOM": "full", "READONLY": "read_only"}.get(error.code, "unavailable")  # type: ignore[return-value]


def held(node: Node, names: Sequence[bytes], timeout: float) -> list[bool]:
    """Which values a server has. Raises ServerError."""
    return [reply == 1 for reply in node.execute([("EXISTS", name) for name in names], timeout)]


def remove(node: Node, names: Iterable[bytes], timeout: float) -> int:
    """Remove values; how many were there. Raises ServerError."""
    replies = node.execute([("UNLINK", name) for name in names], timeout)
    return sum(reply for reply in replies if isinstance(reply, int))
