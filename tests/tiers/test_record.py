"""The record's bytes: pinned, and whatever else is read is a miss and never a crash."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cache.keys import Extras, block_key
from kvstrata.cache.policy import Meta
from kvstrata.tiers.lifetime import Lifetime
from kvstrata.tiers.record import (
    RecordHeader,
    check_identity,
    check_payload,
    decode_header,
    encode_header,
    fits,
    header_bytes,
)
from kvstrata.tiers.tier import Address, Identity

GOLDEN = Path(__file__).parent.parent / "data" / "records" / "version1.bin"
KEY = b"a key of more than 16 bytes"
FINGERPRINT = bytes(range(32))
EXTRAS = Extras(salt="tenant", adapter="french").encode()
TOKENS = b"".join(token.to_bytes(4, "little") for token in range(100, 116))
PARENT = block_key(FINGERPRINT, list(range(16)), EXTRAS)
IDENTITY = Identity(Address(block_key(PARENT, list(range(100, 116)), EXTRAS), 1), PARENT, TOKENS, EXTRAS)
META = Meta(parent=PARENT, group=1, depth=1, cost=2.5, priority=-3, origin="answer", turn=4, slipped=True)
LIFETIME = Lifetime(1_700_000_000.25, 3600.0, 1_700_003_600.25)
PAYLOAD = bytes(range(256)) * 4
SIZE = header_bytes(16)


def encoded(signing_key: bytes | None = None) -> bytes:
    return bytes(
        encode_header(
            FINGERPRINT,
            IDENTITY,
            META,
            PAYLOAD,
            serial=7,
            lifetime=LIFETIME,
            size=SIZE,
            signing_key=signing_key,
        )
    )


def fault(raw: bytes, payload: bytes, signing_key: bytes | None = None) -> str | None:
    header = decode_header(raw)
    if not isinstance(header, RecordHeader):
        return header
    return check_identity(header, FINGERPRINT, IDENTITY, len(PAYLOAD)) or check_payload(
        header, raw, memoryview(payload), signing_key
    )


def test_a_record_written_by_the_first_release_is_still_read():
    golden = GOLDEN.read_bytes()
    header = decode_header(golden[:SIZE])
    assert isinstance(header, RecordHeader)
    assert header.fingerprint == FINGERPRINT
    assert header.identity == IDENTITY
    assert (header.serial, header.lifetime) == (7, LIFETIME)
    meta = header.meta()
    assert (meta.depth, meta.cost, meta.priority, meta.origin, meta.turn, meta.slipped) == (
        1,
        2.5,
        -3,
        "answer",
        4,
        True,
    )
    assert fault(golden[:SIZE], golden[SIZE:], KEY) is None


def test_records_are_written_as_by_the_first_release():
    assert encoded(KEY) + PAYLOAD == GOLDEN.read_bytes()


def test_every_flipped_bit_of_a_header_or_payload_is_found():
    whole = encoded() + PAYLOAD
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert fault(bytes(damaged[:SIZE]), bytes(damaged[SIZE:])) is not None, bit


def test_a_record_of_another_kind_is_told_apart_by_the_field():
    header = decode_header(encoded())
    assert isinstance(header, RecordHeader)
    other = bytes(32)
    assert check_identity(header, other, IDENTITY, len(PAYLOAD)) == "fingerprint"
    wrong = {
        "address": IDENTITY.__class__(Address(other, 1), PARENT, TOKENS, EXTRAS),
        "parent": IDENTITY.__class__(IDENTITY.address, other, TOKENS, EXTRAS),
        "content": IDENTITY.__class__(IDENTITY.address, PARENT, TOKENS[::-1], EXTRAS),
    }
    for reason, identity in wrong.items():
        assert check_identity(header, FINGERPRINT, identity, len(PAYLOAD)) == reason
    assert check_identity(header, FINGERPRINT, IDENTITY, len(PAYLOAD) + 1) == "length"


def test_a_key_finds_what_checksums_alone_cannot():
    forged = encode_header(
        FINGERPRINT, IDENTITY, META, PAYLOAD[::-1], serial=7, lifetime=LIFETIME, size=SIZE, signing_key=None
    )
    assert fault(bytes(forged), PAYLOAD[::-1]) is None
    assert fault(bytes(forged), PAYLOAD[::-1], KEY) == "signature"
    assert fault(encoded(KEY), PAYLOAD, KEY) is None
    assert fault(encoded(KEY), PAYLOAD, KEY + b"!") == "signature"
    assert fault(encoded(KEY), PAYLOAD) is None  # who has no key reads it all the same


def test_extras_that_do_not_fit_are_known_before_writing():
    fitting = Identity(IDENTITY.address, PARENT, TOKENS, bytes(SIZE - 256 - len(TOKENS)))
    assert fits(fitting, SIZE)
    assert not fits(Identity(fitting.address, PARENT, TOKENS, fitting.extras + b"!"), SIZE)


@given(st.binary(max_size=2048))
def test_random_bytes_are_no_record(raw: bytes):
    assert isinstance(decode_header(raw), str)


@given(st.data())
def test_mutated_records_are_misses(data: st.DataObject):
    whole = bytearray(encoded(KEY) + PAYLOAD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=64))
        whole[at : at + len(piece)] = piece
    same = bytes(whole) == encoded(KEY) + PAYLOAD
    assert (fault(bytes(whole[:SIZE]), bytes(whole[SIZE:]), KEY) is None) == same


@given(st.integers(0, SIZE))
def test_truncated_headers_are_no_records(length: int):
    assert isinstance(decode_header(encoded()[:length]), str) == (length < SIZE)


@given(
    depth=st.integers(-(2**40), 2**40),
    turn=st.integers(-(2**40), 2**40),
    cost=st.floats(),
    remaining=st.floats(),
)
def test_odd_meta_is_written_and_read_without_harm(depth: int, turn: int, cost: float, remaining: float):
    meta = Meta(parent=PARENT, group=1, depth=depth, turn=turn, cost=cost)
    raw = encode_header(
        FINGERPRINT,
        IDENTITY,
        meta,
        PAYLOAD,
        serial=1,
        lifetime=Lifetime(0.0, remaining, remaining),
        size=SIZE,
    )
    header = decode_header(raw)
    assert isinstance(header, RecordHeader)
    assert math.isfinite(header.meta().cost)
    assert not math.isnan(header.remaining)
