"""Load or recompute: the plan follows what tiers and prefill were measured to take."""

from __future__ import annotations

import pytest

from kvstrata.cache.retention import FULL
from kvstrata.config import LoadMode
from kvstrata.engine.cost import Costs, PrefillMeter, Present, plan
from kvstrata.tiers.meter import Meter, Speed
from kvstrata.tiers.stack import NOWHERE

MB = 1 << 20


def present(*places: tuple[int, ...], windows: tuple[int | None, ...] = (None,), first: int = 0) -> Present:
    seen = tuple(FULL.within(window) for window in windows)
    return Present(first, places, seen, 16, (MB,) * len(places))


QUICK, SLOW = Speed(0.001, 1000 * MB), Speed(0.1, 10 * MB)
# A block takes 16 ms to compute: quick loads it in 1 ms, slow in 100 ms.
COMPUTE = 0.001


@pytest.mark.parametrize(
    ("places", "speeds", "mode", "end"),
    [
        ((0, 0, 0, 0), [QUICK], "auto", 4),
        ((0, 0, 0, 0), [SLOW], "auto", 0),
        ((0, 0, 0, 0), [SLOW], "always", 4),
        ((0, 0, 0, 0), [QUICK], "never", 0),
        ((0, 0, 1, 1), [QUICK, SLOW], "auto", 2),
        ((1, 1, 1, 1), [QUICK, SLOW], "auto", 0),
        ((0, NOWHERE, 0, 0), [QUICK], "auto", 1),
        ((NOWHERE, 0, 0, 0), [QUICK], "always", 0),
        ((0, 0, 0, 0), [None], "auto", 4),
    ],
)
def test_how_far_it_is_worth_to_load(
    places: tuple[int, ...], speeds: list[Speed | None], mode: LoadMode, end: int
) -> None:
    chosen = plan(present(places), Costs(COMPUTE, speeds), mode)
    assert chosen.end == end


def test_without_a_measured_prefill_all_is_loaded() -> None:
    assert plan(present((0, 0)), Costs(None, [SLOW]), "auto").end == 2


def test_a_window_needs_only_what_is_in_sight() -> None:
    far = (NOWHERE, NOWHERE, 0, 0)
    assert plan(present((0,) * 4, far, windows=(None, 17)), Costs(COMPUTE, [QUICK]), "auto").end == 4
    assert plan(present((0,) * 4, far, windows=(None, 40)), Costs(COMPUTE, [QUICK]), "auto").end == 0
    near = (0, 0, 0, NOWHERE)
    assert plan(present((0,) * 4, near, windows=(None, 17)), Costs(COMPUTE, [QUICK]), "auto").end == 3


def test_a_meter_tells_latency_from_bandwidth() -> None:
    meter = Meter()
    assert meter.speed is None
    for blocks in (1, 4, 16, 2, 8):
        meter.add(blocks * MB, 0.005 + blocks * 0.01)
    speed = meter.speed
    assert speed is not None
    assert speed.latency == pytest.approx(0.005)
    assert speed.seconds(3 * MB) == pytest.approx(0.035)


def test_a_meter_of_calls_of_one_size_takes_all_for_bandwidth() -> None:
    meter = Meter()
    for _ in range(5):
        meter.add(MB, 0.02)
    assert meter.speed == Speed(0.0, pytest.approx(MB / 0.02))  # type: ignore[arg-type]


def test_prefill_is_learnt_from_steps_that_are_mostly_prefill_and_follows() -> None:
    meter = PrefillMeter()
    meter.add(8, 0, 1.0)
    meter.add(64, 60, 1.0)
    assert meter.seconds_per_token is None
    meter.add(100, 0, 1.0)
    assert meter.seconds_per_token == pytest.approx(0.01)
    for _ in range(30):
        meter.add(100, 0, 2.0)
    assert meter.seconds_per_token == pytest.approx(0.02, rel=0.01)
