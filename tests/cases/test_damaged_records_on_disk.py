"""Files cut short, flipped bits, records of others: each is a miss, counted, and the next block is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_files import files_of
from stored import CONTEXT, FINGERPRINT, HIT, PAYLOAD, blocks, drops, misses, options

from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.lifetime import Lifetime
from kvstrata.tiers.record import encode_header
from kvstrata.tiers.tier import Record, StoreContext

GEOMETRY = Geometry(FINGERPRINT, 0, 16, PAYLOAD)
COUNT = 6


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """A sequence in a closed store, block i in slot i."""
    stored = blocks(COUNT)
    tier = DiskTier(options(tmp_path), CONTEXT)
    drops(tier, stored)
    tier.close()
    return stored


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def check_recovers(tier: DiskTier, records: list[Record], missing: set[int]) -> None:
    """What is missing is stored again, and then all of it is right."""
    found = misses(tier, records)
    assert {i for i, miss in enumerate(found) if miss is not HIT} == missing
    assert drops(tier, records) == [None] * COUNT
    assert misses(tier, records) == [HIT] * COUNT
    tier.close()


@pytest.mark.parametrize("part", ["headers", "payloads"])
@pytest.mark.parametrize("keep", [lambda size: 0, lambda size: 1, lambda size: size // 2])
def test_truncated_files_lose_what_was_cut_off(
    tmp_path: Path, records: list[Record], part: str, keep: Callable[[int], int]
):
    path = files_of(tmp_path, part)
    stride = GEOMETRY.stride if part == "payloads" else GEOMETRY.header_bytes
    left = keep(COUNT * stride)
    os.truncate(path, left)
    tier = DiskTier(options(tmp_path), CONTEXT)
    check_recovers(tier, records, set(range(left // stride, COUNT)))


@pytest.mark.parametrize("part", ["headers", "payloads"])
def test_files_truncated_under_a_running_tier_are_misses(tmp_path: Path, records: list[Record], part: str):
    tier = DiskTier(options(tmp_path), CONTEXT)
    os.truncate(files_of(tmp_path, part), 1)
    assert set(misses(tier, records)) == {"length"}
    assert tier.usage().misses["length"] == COUNT
    assert tier.usage().evictions["quarantined"] == COUNT
    assert drops(tier, records) == [None] * COUNT
    assert misses(tier, records) == [HIT] * COUNT
    tier.close()


@pytest.mark.parametrize("running", [False, True])
def test_a_flipped_payload_bit_is_a_miss_and_quarantined(
    tmp_path: Path, records: list[Record], running: bool
):
    tier = DiskTier(options(tmp_path), CONTEXT) if running else None
    flip(files_of(tmp_path, "payloads"), 2 * GEOMETRY.stride + 77, 5)
    tier = tier or DiskTier(options(tmp_path), CONTEXT)
    assert misses(tier, records) == [HIT, HIT, "payload_checksum", HIT, HIT, HIT]
    assert misses(tier, records)[2] == "absent"
    assert tier.usage().misses["payload_checksum"] == 1
    tier.close()
    tier = DiskTier(options(tmp_path), CONTEXT)
    check_recovers(tier, records, {2})


@pytest.mark.parametrize("field", [0, 10, 25, 30, 40, 70, 100, 130, 190, 256, 330, 900])
@pytest.mark.parametrize("running", [False, True])
def test_a_flipped_header_bit_is_a_miss(tmp_path: Path, records: list[Record], field: int, running: bool):
    tier = DiskTier(options(tmp_path), CONTEXT) if running else None
    flip(files_of(tmp_path, "headers"), 3 * GEOMETRY.header_bytes + field)
    tier = tier or DiskTier(options(tmp_path), CONTEXT)
    check_recovers(tier, records, {3})


@pytest.mark.parametrize("what", ["fingerprint", "group", "length", "tokens", "version"])
def test_a_record_of_another_kind_in_our_slot_is_a_miss(tmp_path: Path, records: list[Record], what: str):
    two_groups = StoreContext(FINGERPRINT, 16, (PAYLOAD, PAYLOAD))
    victim = {
        "tokens": blocks(1, chain=9)[0],
        "group": blocks(2, context=two_groups, group=1)[1],
    }.get(what, records[1])
    header = encode_header(
        bytes(32) if what == "fingerprint" else FINGERPRINT,
        victim.identity,
        victim.meta,
        victim.payload[:-1] if what == "length" else victim.payload,
        serial=99,
        lifetime=Lifetime(0.0, float("inf"), float("inf")),
        size=GEOMETRY.header_bytes,
    )
    if what == "version":
        header[24] = 2
    with files_of(tmp_path, "headers").open("r+b") as file:
        file.seek(GEOMETRY.header_bytes)
        file.write(header)
    with files_of(tmp_path, "payloads").open("r+b") as file:
        file.seek(GEOMETRY.stride)
        file.write(victim.payload)
    tier = DiskTier(options(tmp_path), CONTEXT)
    check_recovers(tier, records, {1})


def test_left_overs_of_a_larger_store_are_not_ours(tmp_path: Path, records: list[Record]):
    larger = StoreContext(FINGERPRINT, 32, (2 * PAYLOAD,))
    tier = DiskTier(options(tmp_path), larger)
    theirs = blocks(COUNT, context=larger)
    assert misses(tier, theirs) == ["absent"] * COUNT
    assert drops(tier, theirs) == [None] * COUNT
    tier.close()
    tier = DiskTier(options(tmp_path), CONTEXT)
    check_recovers(tier, records, set())


def test_a_block_that_vanishes_after_the_look_up_is_one_miss(tmp_path: Path, records: list[Record]):
    tier = DiskTier(options(tmp_path), CONTEXT)
    five = records[:5]
    assert tier.lookup([record.identity.address for record in five]) == [True] * 5
    tier.delete([five[2].identity.address])
    assert misses(tier, five) == [HIT, HIT, "absent", HIT, HIT]
    tier.close()
