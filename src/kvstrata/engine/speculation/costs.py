"""What a step takes by its rows: measured at start, corrected by the steps that are run.

A step multiplies every weight once, whatever its rows, which is what proposals live on; what a row adds
depends on the machine, the model and the context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_KEEP = 0.9  # weight of what was known at each new step
_OUTLIER = 3.0  # a step that takes so many times as long as expected tells of the machine, not of its rows


@dataclass(frozen=True)
class Point:
    """Seconds of a step of one sequence. near: where it begins; far: after `StepCosts.context` tokens."""

    rows: int
    near: float
    far: float


@dataclass(frozen=True)
class Span:
    """One sequence's part of a step: its rows, after a context of so many tokens."""

    rows: int
    context: int


class StepCosts:
    """Predicts the seconds of a step. points: measured ones, of at least one number of rows, ascending.

    context: tokens before those of `Point.far`.
    """

    def __init__(self, points: Sequence[Point], context: int) -> None:
        self._rows = [point.rows for point in points]
        self._near = [point.near for point in points]
        # What attention adds for each token of context; noise must not make a context a gain.
        self._per_token = [max(0.0, point.far - point.near) / context for point in points]
        self._ratios: dict[int, float] = {}  # seconds over those of the points, by bit length of rows

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows in all, without attention to a context."""
        return self._at(self._near, rows) * self._ratio(rows)

    def attention(self, span: Span) -> float:
        """What attention to its context adds for one sequence."""
        return self._at(self._per_token, span.rows) * span.context

    def step(self, spans: Sequence[Span]) -> float:
        """Seconds of a step of these sequences."""
        return self.seconds(sum(span.rows for span in spans)) + sum(map(self.attention, spans))

    def observe(self, spans: Sequence[Span], seconds: float) -> None:
        """A step of these sequences took so long."""
        rows = sum(span.rows for span in spans)
        near = self._at(self._near, rows)
        found = (seconds - sum(map(self.attention, spans))) / near if near > 0 else 1.0
        found = min(max(found, 1 / _OUTLIER), _OUTLIER)
        known = self._ratio(rows)
        self._ratios[rows.bit_length()] = _KEEP * known + (1 - _KEEP) * found

    def _ratio(self, rows: int) -> float:
        """That of about as many rows, or of the nearest number that was seen."""
        size = rows.bit_length()
        if size in self._ratios or not self._ratios:
            return self._ratios.get(size, 1.0)
        return self._ratios[min(self._ratios, key=lambda known: (abs(known - size), known))]

    def _at(self, values: list[float], rows: int) -> float:
        """Between measured points, and past the last one, along a line."""
        if len(values) == 1:
            return values[0]
        right = min(max(bisect_left(self._rows, rows), 1), len(values) - 1)
        left = right - 1
        share = (rows - self._rows[left]) / (self._rows[right] - self._rows[left])
        return max(0.0, values[left] + share * (values[right] - values[left]))
