"""What is in the files: headers read one after the other, and the hint of how they were used last."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import xxhash

from kvstrata.tiers.disk.geometry import USE_BYTES
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.record import RecordHeader, decode_header
from kvstrata.tiers.tier import MissReason

CHUNK_BYTES = 1 << 20
_USE = struct.Struct("<QQd8s")  # serial, order of use, seconds left; then a checksum of these
assert _USE.size == USE_BYTES


class Found(NamedTuple):
    """A slot that is not empty. header: or why it is no record."""

    slot: int
    header: RecordHeader | MissReason
    raw: memoryview


class Use(NamedTuple):
    """What was last noted of a record. order: its place in the order of use. remaining: seconds."""

    serial: int
    order: int
    remaining: float


def scan(file: SlotFile) -> Iterator[Found]:
    """All slots that are not empty, in order, verified but for their payloads. Raises OSError."""
    geometry = file.geometry
    at_once = max(1, CHUNK_BYTES // geometry.header_bytes)
    empty = bytes(geometry.header_bytes)
    for first in range(0, file.slots, at_once):
        for slot, raw in enumerate(file.read_headers(first, min(at_once, file.slots - first)), first):
            if raw != empty:
                yield Found(slot, _checked(file, decode_header(raw)), raw)


def _checked(file: SlotFile, header: RecordHeader | MissReason) -> RecordHeader | MissReason:
    """The header, if it belongs into these files."""
    if not isinstance(header, RecordHeader):
        return header
    geometry = file.geometry
    if header.fingerprint != geometry.fingerprint:
        return "fingerprint"
    if header.group != geometry.group:
        return "address"
    fitting = (geometry.payload_bytes, 4 * geometry.block_size)
    return header if (header.payload_bytes, len(header.token_ids)) == fitting else "length"


def read_uses(file: SlotFile) -> dict[int, Use]:
    """Rows of the file of uses by slot; what is damaged is passed over. Raises OSError."""
    raw = file.read_uses()
    uses = {}
    for slot, (serial, order, remaining, checksum) in enumerate(
        _USE.iter_unpack(raw[: len(raw) // USE_BYTES * USE_BYTES])
    ):
        row = raw[slot * USE_BYTES : (slot + 1) * USE_BYTES]
        if serial and xxhash.xxh3_64_digest(row[:-8]) == checksum and remaining >= 0:
            uses[slot] = Use(serial, order, remaining)
    return uses


def encode_uses(slots: int, uses: Mapping[int, Use] | Iterable[tuple[int, Use]]) -> bytes:
    """The file of uses, a row a slot."""
    raw = bytearray(slots * USE_BYTES)
    for slot, use in dict(uses).items():
        row = _USE.pack(*use, b"")[:-8]
        raw[slot * USE_BYTES : (slot + 1) * USE_BYTES] = row + xxhash.xxh3_64_digest(row)
    return bytes(raw)
