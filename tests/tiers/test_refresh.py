"""Early refresh: one request in time instead of all of them at once, by simulated time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import FakeClock

from kvstrata.tiers.refresh import EarlyRefresh, prolongs, refresh_probability, uniform

TTL, DELTA, RATE, PERIODS, BLOCKS = 60.0, 1.0, 200.0, 50, 125


def simulated(beta: float, *, seed: int, leased: bool = True) -> tuple[float, int]:
    """Recomputes a TTL, and requests that found something expired, of steady requests for one hot prefix.

    A recompute takes DELTA seconds, its blocks appear one after another, and while one is under way no other
    begins (if leased).
    """
    clock = FakeClock()
    early = EarlyRefresh(beta, seed=seed, clock=clock)
    deadline = TTL  # the least of all blocks: it moves when the last one has been computed again
    under_way: list[float] = []
    recomputes = expired = 0
    for request in range(int(PERIODS * TTL * RATE)):
        clock.now = request / RATE
        while under_way and under_way[0] + DELTA <= clock.now:
            deadline = under_way.pop(0) + DELTA / BLOCKS + TTL
        missed = deadline <= clock.now
        expired += missed
        if (missed or early.due(deadline, DELTA)) and not (leased and under_way):
            under_way.append(clock.now)
            recomputes += 1
    return recomputes / PERIODS, expired


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_prefix_is_recomputed_about_once_a_ttl_and_nobody_finds_it_expired(seed: int) -> None:
    recomputes, expired = simulated(1.0, seed=seed)
    assert 1.0 <= recomputes <= 1.15
    assert expired == 0


def test_without_it_requests_find_the_prefix_expired() -> None:
    _, expired = simulated(0.0, seed=0)
    assert expired > PERIODS * RATE * DELTA / 2


def test_without_a_lease_several_recompute_at_once() -> None:
    assert simulated(1.0, seed=0, leased=False)[0] > 1.3


def test_a_larger_beta_refreshes_earlier() -> None:
    assert simulated(4.0, seed=0)[0] > simulated(1.0, seed=0)[0] > simulated(0.5, seed=0)[0]


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e4), st.floats(0.01, 10))
def test_the_probability_is_that_of_the_paper(remaining: float, delta: float, beta: float) -> None:
    assert refresh_probability(remaining, delta, beta) == math.exp(-remaining / (beta * delta))
    assert refresh_probability(remaining, delta, beta) <= refresh_probability(remaining / 2, delta, beta)


def test_what_never_expires_or_costs_nothing_is_left_alone() -> None:
    early = EarlyRefresh(1.0, seed=1, clock=lambda: 0.0)
    assert not early.due(math.inf, 5.0)
    assert not any(early.due(1.0, 0.0) for _ in range(100))
    assert not any(EarlyRefresh(0.0, seed=1, clock=lambda: 0.0).due(0.1, 5.0) for _ in range(100))


def test_draws_depend_on_seed_and_number_alone() -> None:
    def draws(seed: int) -> list[bool]:
        early = EarlyRefresh(1.0, seed=seed, clock=lambda: 0.0)
        return [early.due(1.0, 1.0) for _ in range(64)]

    assert draws(1) == draws(1) != draws(2)
    assert 0.25 < sum(draws(1)) / 64 < 0.5


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_uniform_numbers_are_above_0_and_at_most_1(seed: int, counter: int) -> None:
    assert 0.0 < uniform(seed, counter) <= 1.0


@pytest.mark.parametrize(
    ("old", "new", "worth"),
    [(10, 100, True), (49, 100, True), (51, 100, False), (100, 100, False), (-1, 100, True)],
)
def test_a_life_is_prolonged_when_less_than_half_of_it_is_left(old: float, new: float, worth: bool) -> None:
    assert prolongs(old, new, 0.0) is worth
    assert prolongs(old, math.inf, 0.0)
    assert not prolongs(math.inf, math.inf, 0.0)
