"""Ties a drafter to the engine: how many tokens are proposed, for whom, and what is learnt from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstrata.engine.settle import Verdict
from kvstrata.engine.speculation.costs import Span, StepCosts
from kvstrata.engine.speculation.drafter import Drafter
from kvstrata.engine.speculation.plan import least_chance, plan
from kvstrata.engine.work import Work

MOST_ROWS = 128  # proposed in one step: [rows, vocab] logits are big
# Below this an expected gain is within the error of its estimate. Beside others more is asked: the likeliest
# of many chances are overestimated, and those who gain nothing pay for it too.
_GAIN, _GAIN_OF_MANY = 1.04, 1.25
_LEAST_PATIENCE = 64  # decode steps without a proposal before the next try
_MOST_PATIENCE = 1024
_FEW = 8  # sequences
_CERTAIN = 0.9
_PAUSE = 7  # steps of many sequences in which nothing is looked for, after one in which nothing paid
_TRY = 2  # tokens of a try


class Speculator:
    """Decides how far to look ahead.

    costs: of the target model's steps. most: tokens proposed for a sequence in a step. adaptive: propose as
    many as pay, by what was measured; otherwise always as many as there are.
    """

    def __init__(self, drafter: Drafter, costs: StepCosts, *, most: int, adaptive: bool = True) -> None:
        self.drafter = drafter
        self._costs = costs
        self._most = most
        self._adaptive = adaptive
        self._idle = 0
        self._pause = 0
        self._patience = _LEAST_PATIENCE

    def allot(self, works: list[Work], budget: int) -> list[int]:
        """Tokens to propose for each of a step's decodes, at most `budget` together."""
        budget = min(budget, MOST_ROWS)
        if self._adaptive and self._pauses(works, budget):
            return [0] * len(works)
        outlooks = [self._outlook(work) for work in works]
        if not any(outlooks):
            return [0] * len(works)
        if not self._adaptive:
            rooms = []
            for outlook in outlooks:
                rooms.append(min(len(outlook), budget))
                budget -= rooms[-1]
            return rooms
        rooms = self._plan(works, outlooks, budget)
        self._pause = 0 if any(rooms) else _PAUSE
        if any(rooms):
            self._idle, self._patience = 0, _LEAST_PATIENCE
        elif self.drafter.costs is not None:
            self._try_again(works, outlooks, budget, rooms)
        return rooms

    def _pauses(self, works: list[Work], budget: int) -> bool:
        """Whether so many sequences run that proposals hardly pay, and looking for them costs."""
        if len(works) < _FEW:
            return False
        if self._pause:
            self._pause -= 1
            return True
        return least_chance([work.sequence.num_tokens for work in works], self._costs, budget) > _CERTAIN

    def _outlook(self, work: Work) -> list[float]:
        sequence = work.sequence
        left = sequence.request.limit - sequence.num_tokens - 1  # the last token comes without a proposal
        return self.drafter.outlook(sequence, min(self._most, left)) if left > 0 else []

    def _plan(self, works: list[Work], outlooks: list[list[float]], budget: int) -> list[int]:
        return plan(
            outlooks,
            [work.sequence.num_tokens for work in works],
            self._costs,
            self.drafter.costs,
            budget=budget,
            gain=_GAIN_OF_MANY - (_GAIN_OF_MANY - _GAIN) / len(works),
        )

    def _try_again(
        self, works: list[Work], outlooks: list[list[float]], budget: int, rooms: list[int]
    ) -> None:
        """What does not pay is tried once in a while, if it would pay were everything right."""
        self._idle += 1
        if self._idle < self._patience:
            return
        self._idle, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
        hopes = [[1.0] * len(outlook) for outlook in outlooks]
        if any(self._plan(works, hopes, budget)):
            first = next(place for place, outlook in enumerate(outlooks) if outlook)
            rooms[first] = min(_TRY, len(outlooks[first]), budget)

    def propose(self, works: Sequence[Work]) -> list[Work]:
        """The works with the tokens that are proposed for them."""
        drafts = self.drafter.draft(works)
        return [
            replace(work, draft=draft) if draft else work for work, draft in zip(works, drafts, strict=True)
        ]

    def learn(self, works: Sequence[Work], verdicts: Sequence[Verdict], seconds: float) -> None:
        """Works were computed and settled in so many seconds, the drafter's own time aside."""
        self.drafter.learn(works, verdicts)
        if self._adaptive and not any(work.is_prefill or work.count > 1 for work in works):
            self._costs.observe([Span(1 + len(work.draft), work.start) for work in works], seconds)

    def tidy(self) -> None:
        """Let go of what is held for sequences that do not run any more."""
        self.drafter.tidy()

    def reset(self) -> None:
        """Forget what is cached of earlier requests."""
        self.drafter.reset()
