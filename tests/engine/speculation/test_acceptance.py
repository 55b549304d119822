"""Shares that are learnt from outcomes."""

from __future__ import annotations

from toy import make_toy

from kvstrata import SamplingParams
from kvstrata.engine.request import Sequence, Status
from kvstrata.engine.speculation.acceptance import Rate, SequenceRates


def test_a_rate_begins_as_expected_and_goes_where_outcomes_point() -> None:
    rate = Rate(0.5, weight=4.0, keep=0.95)
    assert rate.value == 0.5
    values = []
    for _ in range(100):
        rate.add(True)
        values.append(rate.value)
    assert values == sorted(values)
    assert 0.8 < values[-1] < 1
    for _ in range(100):
        rate.add(False)
    assert rate.value < 0.2


def sequence() -> Sequence:
    toy = make_toy()
    toy.engine.add_request("x", [1], SamplingParams())
    [only] = toy.engine.scheduler.waiting.in_order()
    return only


def test_a_sequences_own_outcomes_count_more_than_those_of_others() -> None:
    rates, good, bad = SequenceRates(), sequence(), sequence()
    for _ in range(20):
        rates.add(good, 4, 4)
        rates.add(bad, 0, 1)
    assert rates.value(good) > rates.value(sequence()) > rates.value(bad)


def test_finished_sequences_are_forgotten() -> None:
    rates, own = SequenceRates(), sequence()
    rates.add(own, 0, 1)
    own.status = Status.FINISHED
    rates.tidy()
    assert rates.value(own) == rates.value(sequence())
