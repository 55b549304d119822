"""Figures that cost next to nothing to keep: counts by bucket, and rates over the last minutes.

One thread writes; others may read at any moment and see each number whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Counts:
    """A histogram at one moment. counts: of each bucket alone, one more than bounds; total: sum of values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Values in all buckets."""
        return sum(self.counts)


class Histogram:
    """How many values fell up to each of the ascending bounds, and beyond the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count many values at once."""
        places = np.searchsorted(self._bounds, values)
        for place, count in enumerate(np.bincount(places, minlength=len(self._counts)).tolist()):
            if count:
                self._counts[place] += count
        self._total += float(values.sum())

    def read(self) -> Counts:
        """The counts at this moment."""
        return Counts(self._bounds, tuple(self._counts), self._total)


class Recent:
    """The sum of what was added in the last `window` seconds, to within a twentieth of it."""

    _SLICES = 20

    def __init__(self, window: float) -> None:
        self.window = window
        self._sums = [0.0] * self._SLICES
        self._slices = [-1] * self._SLICES  # which slice of time each sum is of

    def add(self, amount: float, now: float) -> None:
        """Add an amount at a time of a clock that does not go back."""
        number = self._slice(now)
        place = number % self._SLICES
        if self._slices[place] != number:
            self._sums[place], self._slices[place] = 0.0, number
        self._sums[place] += amount

    def total(self, now: float) -> float:
        """The sum over the window that ends now."""
        oldest = self._slice(now) - self._SLICES + 1
        return sum(
            amount for amount, number in zip(self._sums, self._slices, strict=True) if number >= oldest
        )

    def _slice(self, now: float) -> int:
        return int(now / self.window * self._SLICES)
