"""The wall clock is set back or forth while no process runs: no block outlives what it had left."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored import CONTEXT, HIT, Time, blocks, drops, load, misses, options, with_deadline

from kvstrata.tiers.disk import DiskTier

HOUR, DAY = 3600.0, 86400.0


def stored(tmp_path: Path, time: Time, ttl: float, *, after: float, crash: bool = False) -> None:
    """A block with a time to live, in a store that then runs for a while and ends."""
    tier = DiskTier(options(tmp_path), CONTEXT, clocks=time.clocks)
    drops(tier, with_deadline(blocks(1), time.monotonic + ttl))
    time.pass_by(after)
    if crash:
        tier._store.write_uses = lambda: None  # type: ignore[method-assign]
    tier.close()


def left(tmp_path: Path, time: Time) -> float | str:
    """Seconds that the block still has in a new process, or why it is a miss."""
    time.monotonic = 17.0  # begins anew with each boot
    tier = DiskTier(options(tmp_path), CONTEXT, clocks=time.clocks)
    (outcome,), _ = load(tier, blocks(1))
    tier.close()
    return outcome.miss or outcome.deadline - time.monotonic


@pytest.mark.parametrize(
    ("jump", "expected"),
    [(0.0, 1.5 * HOUR), (HOUR / 2, HOUR), (-HOUR, 1.5 * HOUR), (-DAY, 1.5 * HOUR), (DAY, "absent")],
)
def test_what_remains_is_the_least_of_both_clocks(tmp_path: Path, jump: float, expected: float | str):
    time = Time()
    stored(tmp_path, time, 2 * HOUR, after=HOUR / 2)
    time.wall += jump
    assert left(tmp_path, time) == (expected if isinstance(expected, str) else pytest.approx(expected))


def test_after_a_kill_the_life_at_writing_is_the_limit(tmp_path: Path):
    time = Time()
    stored(tmp_path, time, 2 * HOUR, after=HOUR, crash=True)
    time.wall -= DAY
    assert left(tmp_path, time) == pytest.approx(2 * HOUR)


def test_a_wall_clock_that_jumps_while_running_changes_nothing(tmp_path: Path):
    time = Time()
    tier = DiskTier(options(tmp_path), CONTEXT, clocks=time.clocks)
    drops(tier, with_deadline(blocks(1), time.monotonic + HOUR))
    for jump in (-HOUR, DAY):
        time.wall += jump
        assert misses(tier, blocks(1)) == [HIT]
    time.monotonic += HOUR
    assert misses(tier, blocks(1)) in (["expired"], ["absent"])
    tier.close()


def test_a_tiers_own_limit_holds_for_all_blocks(tmp_path: Path):
    time = Time()
    tier = DiskTier(options(tmp_path, ttl=10.0), CONTEXT, clocks=time.clocks)
    drops(tier, blocks(1))
    assert load(tier, blocks(1))[0][0].deadline == time.monotonic + 10
    time.pass_by(10)
    assert misses(tier, blocks(1)) in (["expired"], ["absent"])
    tier.close()


def test_blocks_without_a_deadline_live_on(tmp_path: Path):
    time = Time()
    stored(tmp_path, time, float("inf"), after=HOUR)
    time.wall += 1000 * DAY
    assert left(tmp_path, time) == float("inf")
