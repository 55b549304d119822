"""How many rows are added, for whom: as many as make tokens a second the most."""

from __future__ import annotations

from itertools import product

import pytest

from kvstrata.engine.speculation.costs import Point, Span, StepCosts
from kvstrata.engine.speculation.plan import plan


def costs(first: float = 1.0, row: float = 0.1, far: float = 0.0) -> StepCosts:
    """A row costs `first`, each further one `row`; each adds `far` after 100 tokens of context."""
    points = [Point(n, first + row * (n - 1), first + row * (n - 1) + far * n) for n in (1, 2, 4, 8, 16, 32)]
    return StepCosts(points, 100)


def rate(outlooks: list[list[float]], rooms: tuple[int, ...], step: StepCosts, contexts: list[int]) -> float:
    tokens = 0.0
    for outlook, room in zip(outlooks, rooms, strict=True):
        chance, tokens = 1.0, tokens + 1.0
        for each in outlook[:room]:
            chance *= each
            tokens += chance
    return tokens / step.step([Span(1 + room, c) for room, c in zip(rooms, contexts, strict=True)])


@pytest.mark.parametrize(
    "outlooks",
    [[[0.9] * 6], [[0.5] * 4], [[0.2] * 4], [[0.9, 0.9, 0.9], [0.3, 0.3]], [[0.6, 0.7, 0.8], [0.95] * 4, []]],
)
@pytest.mark.parametrize("row", [0.05, 0.3, 0.9])
def test_no_other_rooms_give_more_tokens_a_second(outlooks: list[list[float]], row: float) -> None:
    step, contexts = costs(row=row), [10] * len(outlooks)
    rooms = plan(outlooks, contexts, step, None, budget=99, gain=1.0)
    best = max(
        rate(outlooks, other, step, contexts) for other in product(*(range(len(o) + 1) for o in outlooks))
    )
    assert rate(outlooks, tuple(rooms), step, contexts) == pytest.approx(best)


def test_nothing_where_it_would_gain_less_than_asked() -> None:
    assert plan([[0.9] * 4], [10], costs(row=0.88), None, budget=99, gain=1.04) == [0]


def test_the_likeliest_rows_have_the_budget() -> None:
    assert plan([[0.5] * 4, [0.9] * 4], [10, 10], costs(row=0.01), None, budget=3, gain=1.0) == [0, 3]


def test_a_long_context_makes_rows_dearer() -> None:
    near = plan([[0.8] * 8], [10], costs(far=0.5), None, budget=99, gain=1.0)
    far = plan([[0.8] * 8], [2000], costs(far=0.5), None, budget=99, gain=1.0)
    assert far[0] < near[0]


def test_what_proposals_cost_counts() -> None:
    free = plan([[0.9] * 8], [10], costs(), None, budget=99, gain=1.0)
    dear = plan([[0.9] * 8], [10], costs(), costs(first=0.2), budget=99, gain=1.0)
    never = plan([[1.0] * 8], [10], costs(), costs(first=1.0), budget=99, gain=1.0)
    assert free[0] > dear[0] > never[0] == 0


def test_a_full_batch_leaves_no_room_for_guesses() -> None:
    """Where each row costs as much as a token is worth, only what is nearly certain goes."""
    step = costs(first=1.0, row=1.0)
    assert plan([[0.9] * 4] * 16, [10] * 16, step, None, budget=99, gain=1.0) == [0] * 16
