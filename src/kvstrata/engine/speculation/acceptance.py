"""How often proposals turn out right: counts that forget, beside what is known of others like them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.engine.request import Sequence, Status


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


class SequenceRates:
    """The share of a model's proposals that were right, by sequence, beside that of all."""

    def __init__(self, expected: float = 0.7) -> None:
        self._all = Rate(expected, 8.0, 0.99)
        self._own: dict[Sequence, Rate] = {}

    def value(self, sequence: Sequence) -> float:
        """The chance that a token proposed for the sequence is right if those before it are."""
        own = self._own.get(sequence)
        return self._all.value if own is None else own.given(self._all.value)

    def add(self, sequence: Sequence, accepted: int, judged: int) -> None:
        """So many tokens were right, and then one was not where more were compared."""
        own = self._own.setdefault(sequence, Rate(0.0, 8.0, 0.95))
        for right in [True] * accepted + [False] * (judged - accepted):
            own.add(right)
            self._all.add(right)

    def tidy(self) -> None:
        """Forget finished sequences."""
        for sequence in [s for s in self._own if s.status is Status.FINISHED]:
            del self._own[sequence]
