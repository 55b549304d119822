"""A reader pauses on a block while it expires and its space is wanted: right bytes or a miss, no mixture."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from faulty_files import FaultyFiles
from stored import CONTEXT, FINGERPRINT, HIT, PAYLOAD, Time, blocks, drops, load, misses, options

from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES
from kvstrata.tiers.disk.geometry import Geometry

CAP = OVERHEAD_BYTES + Geometry(FINGERPRINT, 0, 16, PAYLOAD).charge(2)


@pytest.mark.parametrize("how", ["expires", "deleted", "wanted"])
def test_what_is_read_is_not_overwritten(tmp_path: Path, how: str):
    files, time = FaultyFiles(), Time()
    tier = DiskTier(options(tmp_path, CAP), CONTEXT, files=files, clocks=time.clocks)
    lasting = how != "expires"
    old = blocks(2, chain=1, deadline=float("inf") if lasting else time.monotonic + 0.05)
    assert drops(tier, old) == [None, None]
    reading, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        reading.set()
        assert go_on.wait(30)

    files.before_read = pause
    into = [memoryview(bytearray(PAYLOAD)) for _ in old]
    future = tier.load([record.identity for record in old], into)
    assert reading.wait(30)
    files.before_read = lambda: None
    time.pass_by(0.2)
    if how == "deleted":
        tier.delete([record.identity.address for record in old])
    dropped = drops(tier, blocks(2, chain=2))  # wants the very slots that are being read
    assert dropped == ["full", "full"]
    go_on.set()
    outcomes = future.result(timeout=30)
    assert [outcome.miss for outcome in outcomes] == (["expired"] * 2 if how == "expires" else [HIT] * 2)
    assert into == [record.payload for record in old]
    assert drops(tier, blocks(2, chain=3)) == [None, None]  # now the space is free, or may be taken
    assert misses(tier, blocks(2, chain=3)) == [HIT, HIT]
    assert load(tier, old)[0][0].miss == "absent"
    tier.close()
