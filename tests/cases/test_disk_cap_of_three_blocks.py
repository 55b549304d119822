"""A cap of three blocks, a file deleted from outside, a fourth block: counts stay true, and the cap holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_files import files_of
from stored import CONTEXT, FINGERPRINT, HIT, PAYLOAD, blocks, drops, folder_bytes, misses, options

from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES
from kvstrata.tiers.disk.geometry import Geometry

CAP = OVERHEAD_BYTES + Geometry(FINGERPRINT, 0, 16, PAYLOAD).charge(3)


@pytest.mark.parametrize("part", ["headers", "payloads", "uses"])
@pytest.mark.parametrize("running", [True, False])
def test_a_fourth_block_after_a_file_was_deleted(tmp_path: Path, part: str, running: bool):
    tier = DiskTier(options(tmp_path, CAP), CONTEXT)
    three, fourth = blocks(3, chain=1), blocks(1, chain=2)
    assert drops(tier, three) == [None] * 3
    if not running:
        tier.close()
    files_of(tmp_path, part).unlink()
    if not running:
        tier = DiskTier(options(tmp_path, CAP), CONTEXT)
    assert drops(tier, fourth) == [None]
    assert misses(tier, fourth) == [HIT]
    left = [miss is HIT for miss in misses(tier, three)]
    assert left == ([True, True, False] if part == "uses" else [False] * 3)
    assert tier.usage().records == 1 + sum(left)
    assert drops(tier, blocks(2, chain=3)) == [None] * 2
    assert misses(tier, blocks(2, chain=3)) == [HIT] * 2
    assert tier.usage().used_bytes <= CAP
    assert folder_bytes(tmp_path / "store") <= CAP
    tier.close()
    tier = DiskTier(options(tmp_path, CAP), CONTEXT)
    assert misses(tier, blocks(2, chain=3)) == [HIT] * 2
    tier.close()


def test_restarts_over_a_full_folder_stay_under_the_cap(tmp_path: Path):
    for chain in range(6):
        tier = DiskTier(options(tmp_path, CAP), CONTEXT)
        assert tier.usage().used_bytes <= CAP
        assert drops(tier, blocks(2, chain=chain)) == [None] * 2
        assert misses(tier, blocks(2, chain=chain)) == [HIT] * 2
        assert folder_bytes(tmp_path / "store") <= CAP
        if chain % 2:
            tier.close()
        else:
            crash(tier)
    tier = DiskTier(options(tmp_path, CAP), CONTEXT)
    assert tier.usage().records == 3
    tier.close()


def crash(tier: DiskTier) -> None:
    """What a kill leaves: nothing noted, the lock gone."""
    tier._upkeep.stop()
    tier._store.shut()
    tier._store.close_files()
