"""What a step takes by its rows: measured at start, corrected by the steps that are run.

A step multiplies every weight once, whatever its rows, which is what proposals live on; what a row adds
depends on the machine, the model and the context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_KEEP = 0.9  # weight of what was known at each new step
_OUTLIER = 3.0  # a step that takes so many times as long as expected tells of the machine, not of its rows


@dataclass(frozen=True)
class Point:
    """Seconds of a step of one sequence. near: where it begins; far: after `StepCosts.context` tokens.

    far is None where it was not measured: what comes before tells.
    """

    rows: int
    near: float
    far: float | None = None


@dataclass(frozen=True)
class Span:
    """One sequence's part of a step: its rows, after a context of so many tokens."""

    rows: int
    context: int


class StepCosts:
    """Predicts the seconds of a step. points: measured ones, ascending by rows, the first with its `far`.

    context: tokens before those of `Point.far`. More rows never take less time, nor does a longer context:
    where it was measured so, something else was running.
    """

    def __init__(self, points: Sequence[Point], context: int) -> None:
        self._rows = [point.rows for point in points]
        self._near = _rising([point.near for point in points])
        far = [(point.far - point.near) / context for point in points if point.far is not None]
        self._per_token = _rising([max(0.0, each) for each in far])  # what attention adds for each token
        self._drift = 1.0  # of late, seconds over those of the points: other programs run, the clock changes
        self._ratios: dict[int, float] = {}  # beside that, of steps of about as many rows (bit length)

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows in all, without attention to a context."""
        return self._at(self._near, rows) * self._ratio(rows)

    def attention(self, span: Span) -> float:
        """What attention to its context adds for one sequence."""
        return self._at(self._per_token, span.rows) * span.context

    def step(self, spans: Sequence[Span]) -> float:
        """Seconds of a step of these sequences."""
        return self.seconds(sum(span.rows for span in spans)) + sum(map(self.attention, spans))

    def least_row(self, rows: int, most: int) -> float:
        """The least that one row of some more can cost, of at most so many more."""
        before = self.seconds(rows)
        counts = {min(1 << shift, most) for shift in range(most.bit_length())} | {most}
        return min((self.seconds(rows + count) - before) / count for count in counts)

    def observe(self, spans: Sequence[Span], seconds: float) -> None:
        """A step of these sequences took so long; a clock that stood still tells nothing."""
        if seconds <= 0:
            return
        rows = sum(span.rows for span in spans)
        near = self._at(self._near, rows)
        found = (seconds - sum(map(self.attention, spans))) / near if near > 0 else 1.0
        found = min(max(found, self._drift / _OUTLIER), self._drift * _OUTLIER)
        size = rows.bit_length()
        known = self._ratios.get(size, 1.0)
        self._ratios[size] = _KEEP * known + (1 - _KEEP) * found / self._drift
        self._drift = _KEEP * self._drift + (1 - _KEEP) * found

    def _ratio(self, rows: int) -> float:
        return self._drift * self._ratios.get(rows.bit_length(), 1.0)

    def _at(self, values: list[float], rows: int) -> float:
        """Between measured points, and past the last one, along a line."""
        if len(values) == 1:
            return values[0]
        right = min(max(bisect_left(self._rows, rows, hi=len(values)), 1), len(values) - 1)
        left = right - 1
        share = (rows - self._rows[left]) / (self._rows[right] - self._rows[left])
        return max(0.0, values[left] + share * (values[right] - values[left]))


def _rising(values: list[float]) -> list[float]:
    """Each value, or the least of those after it: noise only ever adds to a time."""
    return list(accumulate(reversed(values), min))[::-1]
