"""Proposals from the text itself: what followed the last tokens when they came before.

Prompt look-up: answers that quote, edit or extract from their prompt go on as it did. Every sequence has an
index of its n-grams, which grows with it; what a proposal would have been is compared with what came, used
or not, so that how far to trust a match is known without paying for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from itertools import chain
from struct import iter_unpack

import numpy as np

from kvstrata.engine.request import Sequence, Status
from kvstrata.engine.settle import Verdict
from kvstrata.engine.speculation.acceptance import Rate
from kvstrata.engine.speculation.costs import StepCosts
from kvstrata.engine.work import Work

ORDERS = (5, 3, 2)  # lengths of the n-grams, the longest first: it is trusted most
_FEW = 16  # n-grams that are taken one by one: many are quicker all at once
_LONGEST = 32  # tokens of a match that are counted
# By how many tokens match at least: what to think of the next one before anything is known.
_LENGTHS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_EXPECTED = (0.2, 0.3, 0.4, 0.45, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
_OWN_WEIGHT = 1.5  # wrong tokens that a sequence is taken to have had, as often as others have them
_OWN_KEEP, _ALL_KEEP = 0.95, 0.995


class NgramIndex:
    """Where each n-gram of a text last ended. tokens: the text, which grows at its end only."""

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._ends: dict[int, dict[bytes, int]] = {order: {} for order in ORDERS}
        self._known = 0  # tokens whose n-grams are in

    def match(self) -> tuple[int, int]:
        """Where the text goes on as it may now, and how many tokens before that place are the last ones.

        (0, 0) where the last tokens have not come before.
        """
        self._extend()
        tokens, length = self._tokens, len(self._tokens)
        for order in ORDERS:
            place = self._ends[order].get(tokens[length - order :].tobytes()) if length > order else None
            if place is not None:
                most = min(_LONGEST, place)
                while order < most and tokens[place - order - 1] == tokens[length - order - 1]:
                    order += 1  # noqa: PLW2901 (the match is longer than the n-gram)
                return place, order
        return 0, 0

    def following(self, place: int, count: int) -> array[int]:
        """Tokens from a place on; where the text ends, it is taken to repeat from there."""
        found = self._tokens[place : place + count]
        while len(found) < count:
            found.extend(found[: count - len(found)])
        return found

    def _extend(self) -> None:
        """Take in the n-grams that a token is known to follow."""
        first, end = self._known, len(self._tokens) - 1
        if end <= first:
            return
        for order, ends in self._ends.items():
            places = range(max(order, first + 1), end + 1)
            if len(places) < _FEW:
                ends.update((self._tokens[place - order : place].tobytes(), place) for place in places)
                continue
            part = np.frombuffer(self._tokens[places.start - order : end], dtype=np.uint32)
            grams = np.lib.stride_tricks.sliding_window_view(part, order).tobytes()
            keys = chain.from_iterable(iter_unpack(f"{4 * order}s", grams))
            ends.update(zip(keys, places, strict=True))
        self._known = end


@dataclass
class _State:
    """A sequence's index, and what it was last thought to go on with. at: tokens that were known then.

    wrong, expected_wrong: tokens that did not come as expected, and how many of them others would have had,
    the latest most: one number tells whether it copies, whatever the length of its matches.
    """

    index: NgramIndex
    at: int = 0
    length: int = 0
    expected: array[int] = field(default_factory=lambda: array("I"))
    wrong: float = 0.0
    expected_wrong: float = 0.0

    def add(self, right: bool, chance: float) -> None:
        """A token came that was expected with a chance, as others have it."""
        self.wrong = self.wrong * _OWN_KEEP + (not right)
        self.expected_wrong = self.expected_wrong * _OWN_KEEP + 1.0 - chance

    @property
    def doubt(self) -> float:
        """How many times as often as others it is not as expected."""
        return (self.wrong + _OWN_WEIGHT) / (self.expected_wrong + _OWN_WEIGHT)


class NgramDrafter:
    """Prompt look-up for all sequences of an engine."""

    costs: StepCosts | None = None

    def __init__(self) -> None:
        self._states: dict[Sequence, _State] = {}
        self._rates = [Rate(expected, 16.0, _ALL_KEEP) for expected in _EXPECTED]

    def outlook(self, sequence: Sequence, most: int) -> list[float]:
        """By the length of the match, which grows with each token that is right."""
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _State(NgramIndex(sequence.chain.tokens))
        self._judge(state, sequence.chain.tokens)
        place, state.length = state.index.match()
        state.at = sequence.num_tokens
        state.expected = state.index.following(place, most) if state.length else array("I")
        for number, token in enumerate(state.expected):
            if token in sequence.request.stop_ids:
                del state.expected[number + 1 :]
                break
        return self._chances(state)

    def draft(self, works: Listed[Work]) -> list[tuple[int, ...]]:
        """What followed the match."""
        return [
            tuple(self._states[work.sequence].expected[: work.room]) if work.room else () for work in works
        ]

    def learn(self, works: Listed[Work], verdicts: Listed[Verdict]) -> None:
        """Nothing: the next look-up compares with what came, proposed or not."""

    def tidy(self) -> None:
        """Forget the indexes of finished sequences."""
        gone = [sequence for sequence in self._states if sequence.status is Status.FINISHED]
        for sequence in gone:
            del self._states[sequence]

    def reset(self) -> None:
        """Nothing is kept of earlier requests but how often they were right."""

    def _judge(self, state: _State, tokens: array[int]) -> None:
        """Compare what was expected with what came."""
        for number, (expected, came) in enumerate(zip(state.expected, tokens[state.at :], strict=False)):
            rate = self._rates[_bucket(state.length + number)]
            state.add(expected == came, rate.value)
            rate.add(expected == came)
            if expected != came:
                return

    def _chances(self, state: _State) -> list[float]:
        chances: list[float] = []
        until, chance, doubt = 0, 0.0, state.doubt
        for length in range(state.length, state.length + len(state.expected)):
            if length >= until:
                bucket = _bucket(length)
                until = _LENGTHS[bucket + 1] if bucket + 1 < len(_LENGTHS) else length + len(state.expected)
                chance = max(0.0, 1.0 - (1.0 - self._rates[bucket].value) * doubt)
            chances.append(chance)
        return chances


def _bucket(length: int) -> int:
    return max(0, bisect_right(_LENGTHS, length) - 1)
