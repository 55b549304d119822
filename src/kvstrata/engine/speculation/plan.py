"""How many tokens to propose for each sequence: as many as make the step's tokens a second the most.

A run of k tokens, each right with chance a if those before it are, gives 1 + a + a^2 + ... + a^k tokens
(Leviathan, Kalman and Matias, arXiv 2211.17192, section 3.1). Over a batch the likeliest next row goes first,
whosesoever it is, and of all prefixes of that order the best is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from kvstrata.engine.speculation.costs import Span, StepCosts


def plan(
    outlooks: Sequence[Sequence[float]],
    contexts: Sequence[int],
    costs: StepCosts,
    draft_costs: StepCosts | None,
    *,
    budget: int,
    gain: float,
) -> list[int]:
    """Rows to add for each sequence of a decode step.

    outlooks: by sequence, the chance of each next token to be right if those before it are. contexts: tokens
    of each sequence. draft_costs: what it takes to propose one token for each of some sequences (None:
    nothing). budget: most rows in all. gain: no rows at all where the best would give less than so many
    times the tokens a second.
    """
    rooms = [0] * len(outlooks)
    least = least_chance(contexts, costs, budget)
    chances = sorted(
        (-chance, place, sequence)
        for sequence, outlook in enumerate(outlooks)
        for place, chance in enumerate(accumulate(outlook, mul))
        if chance > least
    )
    if not chances:
        return rooms
    spans = [Span(1, context) for context in contexts]
    attention = sum(map(costs.attention, spans))
    tokens, rows, drafting = float(len(spans)), len(spans), 0.0
    best = gain * tokens / (costs.seconds(rows) + attention)
    drafted: list[int] = []  # sequences that a token is proposed for in each round
    taken = 0
    for count, (chance, place, sequence) in enumerate(chances[:budget], start=1):
        tokens -= chance
        wider = Span(spans[sequence].rows + 1, spans[sequence].context)
        attention += costs.attention(wider) - costs.attention(spans[sequence])
        spans[sequence] = wider
        if draft_costs is not None:
            drafting += _round(drafted, place, contexts[sequence], draft_costs)
        rate = tokens / (costs.seconds(rows + count) + attention + drafting)
        if rate > best:
            best, taken = rate, count
    for _, _, sequence in chances[:taken]:
        rooms[sequence] += 1
    return rooms


def least_chance(contexts: Sequence[int], costs: StepCosts, budget: int) -> float:
    """Rows less likely than this lower the tokens a second of a step of these sequences, in any order.

    A row costs at least so much, and a second is worth the tokens that the step gives without any.
    """
    rows = len(contexts)
    attention = costs.attention(Span(1, 1)) * sum(contexts)
    return costs.least_row(rows, budget) * rows / (costs.seconds(rows) + attention)


def _round(drafted: list[int], place: int, context: int, costs: StepCosts) -> float:
    """What one more sequence adds to the round in which the tokens at `place` are proposed."""
    if place == len(drafted):
        drafted.append(0)
    before = costs.seconds(drafted[place]) if drafted[place] else 0.0
    drafted[place] += 1
    return costs.seconds(drafted[place]) - before + costs.attention(Span(1, context))
