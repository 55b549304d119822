"""Looking after a folder: flipped bits are found, tenants forgotten, copies serve as the original does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_files import files_of
from stored import (
    CONTEXT,
    FINGERPRINT,
    HIT,
    PAYLOAD,
    Time,
    blocks,
    drops,
    folder_bytes,
    load,
    misses,
    options,
    with_deadline,
)

from kvstrata.errors import ConfigError
from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.care import StoreFolder
from kvstrata.tiers.disk.copy import copy_store
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.tier import StoreContext

GEOMETRY = Geometry(FINGERPRINT, 0, 16, PAYLOAD)
OTHER = StoreContext(bytes(32), 16, (PAYLOAD, 8192))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Two models; two salts in the first, two groups in the second."""
    tier = DiskTier(options(tmp_path), CONTEXT)
    drops(tier, blocks(3, salt="a"))
    drops(tier, blocks(3, chain=1, salt="b"))
    tier.close()
    tier = DiskTier(options(tmp_path), OTHER)
    drops(tier, blocks(2, context=OTHER))
    drops(tier, blocks(2, context=OTHER, group=1))
    tier.close()
    return tmp_path


def faults(path: Path) -> list[str]:
    with StoreFolder(options(path)) as store:
        return [record.fault for record in store.verify() if record.fault is not None]


@pytest.mark.parametrize("part", ["headers", "payloads"])
def test_verify_finds_any_single_flipped_bit(tmp_path: Path, part: str):
    tier = DiskTier(options(tmp_path), CONTEXT)
    drops(tier, blocks(2))
    tier.close()
    assert faults(tmp_path) == []
    path = files_of(tmp_path, part)
    whole = path.read_bytes()[: 2 * (GEOMETRY.stride if part == "payloads" else GEOMETRY.header_bytes)]
    for at in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert len(faults(tmp_path)) == 1, at
    path.write_bytes(whole)
    assert faults(tmp_path) == []


def test_verify_covers_all_models_and_groups(folder: Path):
    with StoreFolder(options(folder)) as store:
        assert [record.fault for record in store.verify()] == [None] * 10


def test_a_tenant_is_forgotten_bytes_and_all(folder: Path):
    raw = b"".join(path.read_bytes() for path in (folder / "store").iterdir())
    gone = blocks(3, chain=1, salt="b")
    assert all(bytes(record.payload) in raw for record in gone)
    before = folder_bytes(folder / "store")
    with StoreFolder(options(folder), write=True) as store:
        cleaned = store.clean(lambda record: "salt" if record.salt == "b" else None)
    assert (cleaned.removed, cleaned.kept) == ({"salt": 3}, 7)
    assert folder_bytes(folder / "store") < before
    raw = b"".join(path.read_bytes() for path in (folder / "store").iterdir())
    assert not any(bytes(record.payload) in raw for record in gone)
    assert not any(record.identity.address.key in raw for record in gone)
    tier = DiskTier(options(folder), CONTEXT)
    assert misses(tier, gone) == ["absent"] * 3
    assert misses(tier, blocks(3, salt="a")) == [HIT] * 3
    tier.close()


def test_cleaning_drops_what_expired_or_is_damaged(tmp_path: Path):
    time = Time()
    tier = DiskTier(options(tmp_path), CONTEXT, clocks=time.clocks)
    drops(tier, blocks(2))
    drops(tier, with_deadline(blocks(2, chain=1), time.monotonic + 10))
    tier.close()
    with files_of(tmp_path, "headers").open("r+b") as file:
        file.write(b"?")
    (tmp_path / "store" / "old.headers").write_bytes(b"of long ago")
    time.pass_by(60)
    with StoreFolder(options(tmp_path), write=True, clocks=time.clocks) as store:
        cleaned = store.clean(lambda record: None)
    assert cleaned.removed == {"expired": 2, "magic": 1, "unknown_file": 1}
    assert cleaned.kept == 1
    assert cleaned.after == folder_bytes(tmp_path / "store") or cleaned.after < cleaned.before


def test_a_copy_serves_what_the_original_does(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    target = tmp_path_factory.mktemp("target")
    result = copy_store(options(folder), options(target))
    assert (result.copied, result.passed_over) == (10, {})
    tier = DiskTier(options(target), CONTEXT)
    assert misses(tier, blocks(3, salt="a")) == [HIT] * 3
    tier.close()
    tier = DiskTier(options(target), OTHER)
    assert misses(tier, blocks(2, context=OTHER, group=1)) == [HIT] * 2
    tier.close()
    assert copy_store(options(folder), options(target)).copied == 10  # they are there already
    with StoreFolder(options(target)) as store:
        assert [record.fault for record in store.verify()] == [None] * 10


def test_copies_do_not_outlive_the_original_and_damage_is_left_behind(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    time, target = Time(), tmp_path_factory.mktemp("target")
    tier = DiskTier(options(tmp_path), CONTEXT, clocks=time.clocks)
    drops(tier, with_deadline(blocks(2), time.monotonic + 100))
    drops(tier, with_deadline(blocks(1, chain=1), time.monotonic + 10))
    tier.close()
    with files_of(tmp_path, "payloads").open("r+b") as file:
        file.write(b"?")
    time.pass_by(60)
    result = copy_store(options(tmp_path), options(target), clocks=time.clocks)
    assert (result.copied, result.passed_over) == (1, {"expired": 1, "payload_checksum": 1})
    tier = DiskTier(options(target), CONTEXT, clocks=time.clocks)
    outcomes, _ = load(tier, blocks(2))
    assert outcomes[1].deadline == pytest.approx(time.monotonic + 40)
    tier.close()


def test_a_folder_in_use_is_not_cleaned(folder: Path):
    tier = DiskTier(options(folder), CONTEXT)
    with pytest.raises(ConfigError, match="in use"):
        StoreFolder(options(folder), write=True)
    assert faults(folder) == []  # looking is allowed
    tier.close()


def test_a_folder_without_a_store_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no store"):
        StoreFolder(options(tmp_path))
    with pytest.raises(ConfigError, match="give two folders"):
        copy_store(options(tmp_path), options(tmp_path))
