"""Predicted seconds: on a line between measured rows, with the context, and corrected by what was seen."""

from __future__ import annotations

import pytest

from kvstrata.engine.speculation.costs import Point, Span, StepCosts


def measured() -> StepCosts:
    return StepCosts([Point(1, 1.0, 3.0), Point(4, 4.0, 12.0), Point(8, 6.0, 16.0)], 100)


def test_between_points_and_past_the_last_along_a_line() -> None:
    costs = measured()
    assert [costs.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx([1, 2, 4, 5, 6, 7])


def test_attention_grows_with_context_and_rows() -> None:
    costs = measured()
    assert costs.attention(Span(1, 50)) == pytest.approx(1.0)
    assert costs.attention(Span(4, 200)) == pytest.approx(16.0)
    assert costs.step([Span(1, 50), Span(3, 0)]) == pytest.approx(5.0)


def test_a_point_alone_holds_for_all() -> None:
    assert StepCosts([Point(1, 2.0, 2.0)], 10).seconds(9) == 2.0


def test_noise_in_the_measurement_makes_no_context_a_gain() -> None:
    assert StepCosts([Point(1, 2.0, 1.0)], 10).attention(Span(1, 100)) == 0


def test_steps_that_take_longer_correct_what_is_expected_of_their_size() -> None:
    costs = measured()
    for _ in range(200):
        costs.observe([Span(1, 0)], 1.0)
        costs.observe([Span(4, 0)], 6.0)
    assert costs.seconds(1) == pytest.approx(1.0, rel=0.05)
    assert costs.seconds(4) == pytest.approx(6.0, rel=0.05)


def test_a_machine_that_slows_down_slows_down_for_all_rows() -> None:
    costs = measured()
    for _ in range(200):
        costs.observe([Span(1, 0)], 2.0)
    assert costs.seconds(1) == pytest.approx(2.0, rel=0.01)
    assert costs.seconds(8) == pytest.approx(12.0, rel=0.01)


def test_more_rows_never_take_less_time() -> None:
    noisy = StepCosts([Point(1, 1.0, 1.0), Point(2, 9.0, 9.0), Point(4, 2.0, 2.5), Point(8, 3.0)], 10)
    assert [noisy.seconds(rows) for rows in (1, 2, 4, 8)] == [1.0, 2.0, 2.0, 3.0]
    assert noisy.attention(Span(2, 10)) == 0
    assert noisy.attention(Span(4, 10)) == pytest.approx(0.5)
    assert noisy.attention(Span(8, 10)) > 0.5


def test_the_least_that_a_row_can_cost() -> None:
    costs = measured()
    assert costs.least_row(1, 7) == pytest.approx(5 / 7)
    assert costs.least_row(1, 1) == pytest.approx(1.0)
    assert costs.least_row(4, 8) == pytest.approx(0.5)


def test_one_step_that_was_held_up_changes_little() -> None:
    costs = measured()
    costs.observe([Span(1, 0)], 1000.0)
    assert costs.seconds(1) < 1.5
