"""The record: how one block looks outside the process, the same bytes on disk and on the network.

A header of a fixed size for each block size, then the payload. docs/store-format.md has the table of fields.
A record is valid by its checksums alone: nothing else says whether a write was finished.
"""

from __future__ import annotations

import hmac
import math
import struct
from typing import NamedTuple

import xxhash

from kvstrata.cache.keys import hides
from kvstrata.cache.policy import Meta
from kvstrata.tiers.lifetime import Lifetime
from kvstrata.tiers.tier import Address, Identity, MissReason

MAGIC = b"kvstrata"
VERSION = 1
FIXED_BYTES = 256  # fields before the token ids
HEADER_STEP = 1024  # a header's size is a multiple of it
LEAST_EXTRAS_BYTES = 512  # extras of this size always fit

_CHECKED_FROM = 24  # magic and the header's checksum come first; the checksum covers all that follows
_TAG = slice(216, 248)
_ANSWER, _SLIPPED, _SIGNED = 1, 2, 4
_MAX_U32 = 2**32 - 1
_FIELDS = struct.Struct("<8s16sHHI32s32s32sQQIIIiIIdddd16s32s8s")
assert _FIELDS.size == FIXED_BYTES


class RecordHeader(NamedTuple):
    """All that a record says of its payload, as it is stored.

    flags: origin, slipped, signed. depth, priority, turn, cost: see `Meta`. serial: order of writing within a
    store. written, remaining, expires: see `Lifetime`. tag: HMAC, which counts if the record is signed.
    segment: see `Identity`; empty where it is not known.
    """

    flags: int
    group: int
    fingerprint: bytes
    key: bytes
    parent: bytes
    token_ids: bytes
    extras: bytes
    payload_bytes: int
    serial: int
    depth: int
    priority: int
    turn: int
    cost: float
    written: float
    remaining: float
    expires: float
    payload_checksum: bytes
    tag: bytes
    segment: bytes

    @property
    def identity(self) -> Identity:
        """What tells its block from all others."""
        return Identity(Address(self.key, self.group), self.parent, self.token_ids, self.extras, self.segment)

    @property
    def lifetime(self) -> Lifetime:
        """How long it is served."""
        return Lifetime(self.written, self.remaining, self.expires)

    @property
    def is_signed(self) -> bool:
        return bool(self.flags & _SIGNED)

    def meta(self, born: float = 0.0, deadline: float = math.inf) -> Meta:
        """What policies weigh, with the times that only mean something within a process."""
        return Meta(
            b"" if hides(self.extras) else self.parent,
            self.group,
            self.depth,
            self.payload_bytes,
            self.cost if math.isfinite(self.cost) else 1.0,
            self.priority,
            born,
            deadline,
            "answer" if self.flags & _ANSWER else "prompt",
            self.turn,
            bool(self.flags & _SLIPPED),
        )


def header_bytes(block_size: int) -> int:
    """The size of the header of a record with so many token ids."""
    return -(-(FIXED_BYTES + 4 * block_size + LEAST_EXTRAS_BYTES) // HEADER_STEP) * HEADER_STEP


def fits(identity: Identity, size: int) -> bool:
    """Whether a header of `size` bytes has room for what tells this block from others."""
    return FIXED_BYTES + len(identity.token_ids) + len(identity.extras) <= size


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """16 bytes: XXH3-128, which runs at memory speed and lets other threads run meanwhile."""
    return xxhash.xxh3_128_digest(payload)


def encode_header(
    fingerprint: bytes,
    identity: Identity,
    meta: Meta,
    payload: memoryview | bytes,
    *,
    serial: int,
    lifetime: Lifetime,
    size: int,
    signing_key: bytes | None = None,
) -> bytearray:
    """A header of `size` bytes for a payload; see `fits`. signing_key: adds HMAC-SHA256 over both."""
    meta_flags = (_ANSWER if meta.origin == "answer" else 0) | (_SLIPPED if meta.slipped else 0)
    raw = bytearray(size)
    _FIELDS.pack_into(
        raw,
        0,
        MAGIC,
        b"",
        VERSION,
        meta_flags | (0 if signing_key is None else _SIGNED),
        identity.address.group,
        fingerprint,
        identity.address.key,
        identity.parent,
        len(payload),
        serial,
        len(identity.token_ids),
        len(identity.extras),
        min(max(meta.depth, 0), _MAX_U32),
        meta.priority,
        min(max(meta.turn, 0), _MAX_U32),
        0,
        meta.cost,
        lifetime.written,
        lifetime.remaining,
        lifetime.expires,
        payload_checksum(payload),
        b"",
        identity.segment,
    )
    tokens_end = FIXED_BYTES + len(identity.token_ids)
    raw[FIXED_BYTES:tokens_end] = identity.token_ids
    raw[tokens_end : tokens_end + len(identity.extras)] = identity.extras
    if signing_key is not None:
        raw[_TAG] = _tag(signing_key, raw, payload)
    raw[8:_CHECKED_FROM] = xxhash.xxh3_128_digest(memoryview(raw)[_CHECKED_FROM:])
    return raw


def decode_header(raw: memoryview | bytes) -> RecordHeader | MissReason:
    """The header in these bytes, or why there is none; `raw` is exactly the header, whatever is in it."""
    view = memoryview(raw)
    if len(view) < FIXED_BYTES:
        return "length"
    (
        magic,
        checksum,
        version,
        flags,
        group,
        fingerprint,
        key,
        parent,
        payload_bytes,
        serial,
        token_bytes,
        extras_bytes,
        depth,
        priority,
        turn,
        _,
        cost,
        written,
        remaining,
        expires,
        payload_sum,
        tag,
        segment,
    ) = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        return "magic"
    if version != VERSION:
        return "version"
    if xxhash.xxh3_128_digest(view[_CHECKED_FROM:]) != checksum:
        return "header_checksum"
    tokens_end = FIXED_BYTES + token_bytes
    end = tokens_end + extras_bytes
    if end > len(view):
        return "length"
    return RecordHeader(
        flags,
        group,
        fingerprint,
        key,
        parent,
        bytes(view[FIXED_BYTES:tokens_end]),
        bytes(view[tokens_end:end]),
        payload_bytes,
        serial,
        depth,
        priority,
        turn,
        cost,
        written,
        _lasting(remaining),
        _lasting(expires),
        payload_sum,
        tag,
        segment if any(segment) else b"",
    )


def check_identity(
    header: RecordHeader, fingerprint: bytes, wanted: Identity, payload_bytes: int
) -> MissReason | None:
    """Why a record is not the block that is wanted, if so; every field is compared, not only the key."""
    if header.fingerprint != fingerprint:
        return "fingerprint"
    if (header.key, header.group) != wanted.address:
        return "address"
    if header.parent != wanted.parent:
        return "parent"
    if header.token_ids != wanted.token_ids or header.extras != wanted.extras:
        return "content"
    return None if header.payload_bytes == payload_bytes else "length"


def check_payload(
    header: RecordHeader, raw: memoryview | bytes, payload: memoryview, signing_key: bytes | None = None
) -> MissReason | None:
    """Why a payload is not the one that was stored under this header, if so.

    raw: the bytes that `header` was decoded from. signing_key: demands a tag by this key.
    """
    if payload_checksum(payload) != header.payload_checksum:
        return "payload_checksum"
    if signing_key is None:
        return None
    signed = header.is_signed and hmac.compare_digest(header.tag, _tag(signing_key, bytearray(raw), payload))
    return None if signed else "signature"


def _tag(signing_key: bytes, raw: bytearray, payload: memoryview | bytes) -> bytes:
    """HMAC-SHA256 over the header without magic, checksum and tag, and the payload.

    The payload itself and not only its checksum: XXH3 is not made to withstand someone who looks for another
    payload with the same sum.
    """
    raw = bytearray(raw)
    raw[_TAG] = bytes(32)
    mac = hmac.new(signing_key, memoryview(raw)[_CHECKED_FROM:], "sha256")
    mac.update(payload)
    return mac.digest()


def _lasting(seconds: float) -> float:
    return 0.0 if math.isnan(seconds) else seconds
