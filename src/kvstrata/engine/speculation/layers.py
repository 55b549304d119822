"""Proposals by the target model's own first layers with its head: no second copy of weights, K or V.

The layers write their K and V to the sequence's blocks, where the whole model will write the same ones again
(self-speculation; Zhang et al., arXiv 2309.08168, Elhoushi et al., arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from kvstrata.engine.request import Sequence
from kvstrata.engine.runner import Runner
from kvstrata.engine.settle import Verdict
from kvstrata.engine.speculation.acceptance import SequenceRates
from kvstrata.engine.speculation.costs import StepCosts
from kvstrata.engine.speculation.rounds import propose, run_for
from kvstrata.engine.work import Work


class LayersDrafter:
    """runner: of the first layers, over the target's cache. vocab_size: of the target's logits."""

    def __init__(self, runner: Runner, costs: StepCosts, vocab_size: int) -> None:
        self.costs: StepCosts | None = costs
        self._costs = costs
        self._runner = runner
        self._vocab_size = vocab_size
        self._rates = SequenceRates()

    def outlook(self, sequence: Sequence, most: int) -> list[float]:
        """The same chance at every place."""
        return [self._rates.value(sequence)] * most

    def draft(self, works: Listed[Work]) -> list[tuple[int, ...]]:
        """One pass through the layers for each token."""
        runs = {}
        for place, work in enumerate(works):
            cache = work.sequence.cache
            if work.room and cache is not None:
                last = work.sequence.chain.tokens[work.start : work.start + 1]
                runs[place] = run_for(work, cache.tables, work.start, last)
        propose(self._runner, list(runs.values()), self._costs, self._vocab_size)
        return [tuple(runs[place].tokens) if place in runs else () for place in range(len(works))]

    def learn(self, works: Listed[Work], verdicts: Listed[Verdict]) -> None:
        """Count what was right."""
        for work, verdict in zip(works, verdicts, strict=True):
            if work.draft:
                self._rates.add(work.sequence, verdict.accepted, verdict.judged)

    def tidy(self) -> None:
        """Forget finished sequences."""
        self._rates.tidy()

    def reset(self) -> None:
        """Nothing is cached here."""
