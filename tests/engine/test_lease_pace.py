"""Leases outlast steps, and what followers risk is bounded by what computing takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from cluster import TOKEN_SECONDS, Prefill

from kvstrata.engine.lease_pace import LeasePace


@dataclass
class Desk:
    round_trip: float


def pace_of(round_trip: float = 0.001) -> LeasePace:
    return LeasePace(Desk(round_trip), Prefill(), 16, 512)  # type: ignore[arg-type]


def test_a_lease_outlasts_two_steps_however_slow_they_are() -> None:
    pace = pace_of()
    assert pace.lease_seconds >= 2 * 512 * TOKEN_SECONDS
    pace.stepped(512, 9.0)
    assert pace.lease_seconds >= 18.0
    assert pace.renew_seconds < pace.lease_seconds / 2
    for _ in range(100):
        pace.stepped(512, 1.0)
    assert pace.lease_seconds < 18.0


@pytest.mark.parametrize("blocks", [1, 10, 100, 10_000])
def test_a_follower_risks_no_more_than_the_prompt_and_a_lease_are_worth(blocks: int) -> None:
    pace = pace_of()
    alone = blocks * pace.block_seconds
    assert pace.patience(blocks) <= 1.5 * alone + 2 * pace.interval
    assert pace.patience(blocks) <= 1.5 * pace.lease_seconds + 2 * pace.interval


def test_short_prompts_and_slow_places_are_not_worth_a_lease() -> None:
    pace = pace_of()
    assert pace.worth(1, 0.0)
    assert not pace.worth(100, pace.block_seconds)
    slow = pace_of(1.0)
    assert not slow.worth(100, 0.0)
    assert slow.worth(200, 0.0)


def test_looks_come_closer_to_each_other_towards_the_end_of_the_leader_s_step() -> None:
    pace = pace_of()
    step, looks = pace.step_seconds, [pace.next_look(0.0, 0.0, 100)]
    assert looks[0] == pytest.approx(pace.interval)  # more of the step that something appeared of
    while looks[-1] < step:
        looks.append(pace.next_look(looks[-1], 0.0, 100))
    waits = [b - a for a, b in itertools.pairwise(looks)]
    assert waits == sorted(waits, reverse=True)
    assert len(looks) <= 8
    assert step <= looks[-1] <= step + pace.interval
    assert pace.next_look(3 * step, 0.0, 100) == pytest.approx(3 * step + pace.interval)
    assert pace.next_look(0.1 * step, 0.0, 32) == pytest.approx(0.1 * step + pace.interval)  # the last step's
