"""kill -9 while blocks are stored: what was acknowledged is there, and nothing wrong is served."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scale import scaled
from stored import CONTEXT, HIT, blocks, drops, folder_bytes, misses, options

from kvstrata.tiers.disk import DiskTier

SCRIPT = Path(__file__).with_name("store_and_be_killed.py")
TESTS = SCRIPT.parent.parent
CAP = 1 << 23  # bytes: some 900 blocks, so that slots are reused too


def run_and_kill(folder: Path, seed: int, seconds: float, forgetful: bool) -> list[tuple[int, list[str]]]:
    """What was acknowledged, in order: the chain, and for each block why it was dropped."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(CAP), str(seed), str(int(forgetful))],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait(30) == -signal.SIGKILL
    acknowledged = []
    for line in rest.split("\n")[:-1]:
        chain, *outcomes = line.split(" ")
        acknowledged.append((int(chain), outcomes))
    return acknowledged


@pytest.mark.slow
@pytest.mark.parametrize("forgetful", [False, True])
def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path, forgetful: bool):
    draw = random.Random(5)
    served = 0
    for seed in range(scaled(100, 6)):
        acknowledged = run_and_kill(tmp_path, seed, draw.uniform(0.0, 0.5), forgetful)
        assert folder_bytes(tmp_path / "store") <= CAP
        tier = DiskTier(options(tmp_path, CAP), CONTEXT)
        assert tier.usage().used_bytes <= CAP
        # The last to be stored have not been evicted since. Processes delete tails now and then.
        for chain, outcomes in acknowledged[-60:]:
            records = blocks(len(outcomes), chain=chain)
            found = misses(tier, records)  # compares every byte that is served
            kept = [outcome == "-" for outcome in outcomes]
            served += found.count(HIT)
            if not forgetful:
                missing = [i for i, miss in enumerate(found) if kept[i] and miss is not HIT]
                assert missing in ([], [len(outcomes) - 1]), (seed, chain, outcomes, found)
        after = blocks(3, chain=1_000_000 + seed)
        assert drops(tier, after) == [None] * 3
        assert misses(tier, after) == [HIT] * 3
        tier.close()
        assert folder_bytes(tmp_path / "store") <= CAP
    assert served > 0
