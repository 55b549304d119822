"""How often proposals turn out right: counts that forget, beside what is known of others like them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Rate:
    """A share that is learnt from single outcomes, the latest ones most.

    expected: what to think before any. weight: outcomes that this counts for. keep: what is left of an
    outcome's weight at the next.
    """

    expected: float
    weight: float
    keep: float
    _right: float = 0.0
    _seen: float = 0.0

    def add(self, right: bool) -> None:
        """One more outcome."""
        self._right = self._right * self.keep + right
        self._seen = self._seen * self.keep + 1.0

    @property
    def value(self) -> float:
        """The share as it stands, between 0 and 1."""
        return self.given(self.expected)

    def given(self, expected: float) -> float:
        """The share where this is what to think before any outcome."""
        return (self._right + expected * self.weight) / (self._seen + self.weight)
