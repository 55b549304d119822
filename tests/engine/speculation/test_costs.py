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
    for _ in range(60):
        costs.observe([Span(1, 0)], 1.0)
        costs.observe([Span(4, 0)], 6.0)
    assert costs.seconds(1) == pytest.approx(1.0)
    assert costs.seconds(4) == pytest.approx(6.0, rel=0.01)
    assert costs.seconds(8) == pytest.approx(9.0, rel=0.01), "as the nearest that was seen"


def test_one_step_that_was_held_up_changes_little() -> None:
    costs = measured()
    costs.observe([Span(1, 0)], 1000.0)
    assert costs.seconds(1) < 1.3
