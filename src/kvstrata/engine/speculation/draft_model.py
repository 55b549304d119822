"""Proposals by a smaller model, with a pool and a prefix cache of its own.

It has to know a sequence before it can go on with it: what of the prompt its own cache does not hold it
computes, a chunk a step, and only where what is left of the answer can win that back.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from kvstrata.cache.manager import KVCache
from kvstrata.engine.request import Sequence, Status
from kvstrata.engine.runner import Chunk, Runner
from kvstrata.engine.settle import Verdict
from kvstrata.engine.speculation.acceptance import SequenceRates
from kvstrata.engine.speculation.costs import Span, StepCosts
from kvstrata.engine.speculation.plan import plan
from kvstrata.engine.speculation.rounds import Run, propose, run_for
from kvstrata.engine.speculation.shadow import Shadow, Shadows
from kvstrata.engine.work import Work

_ASK_AGAIN = 16  # tokens after which a sequence that was not worth catching up with is looked at again
_AT_ONCE = 16  # tokens that it may lag behind and yet propose: they are computed with its first token


def widest_step(chunk: int, draft_tokens: int) -> int:
    """Most tokens of one sequence in a step of the draft model, whose prompts come in chunks of so many."""
    return max(chunk, _AT_ONCE + draft_tokens)


class ModelDrafter:
    """runner, cache: of the draft model. costs, target_costs: of its steps and of the target's.

    vocab_size: ids that both models know. max_len: most tokens of a sequence that it can take. chunk: most
    tokens of prompts that it computes in a step. adaptive: whether what does not pay is left.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        costs: StepCosts,
        target_costs: StepCosts,
        *,
        vocab_size: int,
        max_len: int,
        chunk: int,
        adaptive: bool = True,
    ) -> None:
        self.costs: StepCosts | None = costs
        self.cache = cache
        self._runner = runner
        self._costs = costs
        self._target_costs = target_costs
        self._vocab_size = vocab_size
        self._max_len = min(max_len, cache.capacity_tokens)
        self._chunk = chunk
        self._adaptive = adaptive
        self._rates = SequenceRates()
        self._shadows = Shadows(cache)
        self._behind: list[Sequence] = []

    def outlook(self, sequence: Sequence, most: int) -> list[float]:
        """The same chance at every place, once it knows the sequence."""
        most = min(most, self._max_len - sequence.num_tokens)
        if most <= 0:
            return []
        shadow = self._shadows.of(sequence)
        if shadow.pending > _AT_ONCE:
            if self._worth_it(sequence, shadow, most):
                self._behind.append(sequence)
            return []
        start = 0 if shadow.cache is None else shadow.cache.num_computed
        if max(shadow.chain.tokens[start:]) >= self._vocab_size:
            return []  # an id of the target's padding
        return [self._rates.value(sequence)] * most

    def _worth_it(self, sequence: Sequence, shadow: Shadow, most: int) -> bool:
        """Whether the rest of the answer, were it as long as it may be, gains more than catching up takes."""
        if not self._adaptive:
            return True
        if shadow.refused is not None and sequence.num_tokens < shadow.refused + _ASK_AGAIN:
            return False
        worth = self._gains(sequence, shadow, most)
        shadow.refused = None if worth else sequence.num_tokens
        return worth

    def _gains(self, sequence: Sequence, shadow: Shadow, most: int) -> bool:
        chance, context = self._rates.value(sequence), sequence.num_tokens
        costs, own = self._target_costs, self._costs
        [room] = plan([[chance] * most], [context], costs, own, budget=most, gain=1.0)
        if room == 0:
            return False
        tokens = sum(chance**place for place in range(room + 1))
        drafting = room * own.step([Span(1, context)])
        step = costs.step([Span(1 + room, context)]) + drafting
        gained = costs.step([Span(1, context)]) - step / tokens
        return gained * (sequence.request.limit - context) > own.seconds(self._shadows.missing(shadow))

    def draft(self, works: Listed[Work]) -> list[tuple[int, ...]]:
        """One pass of the draft model for each token, and a chunk of what it does not know yet."""
        self._shadows.begin_step()
        runs: dict[int, Run] = {}
        for place, work in enumerate(works):
            if work.room and (run := self._run(work)) is not None:
                runs[place] = run
        propose(self._runner, list(runs.values()), self._costs, self._vocab_size)
        for place, run in runs.items():
            shadow = self._shadows.of(works[place].sequence)
            shadow.base, shadow.drafted = works[place].sequence.num_tokens, len(run.tokens)
            if run.tokens and shadow.cache is not None:
                self.cache.commit(shadow.cache, shadow.base)
        self._catch_up()
        return [tuple(runs[place].tokens) if place in runs else () for place in range(len(works))]

    def _run(self, work: Work) -> Run | None:
        shadow = self._shadows.of(work.sequence)
        # The last token proposed is not computed here.
        if not self._shadows.grow(shadow, len(shadow.chain) + work.room - 1):
            return None
        assert shadow.cache is not None
        start, pending = self._shadows.pending(shadow, len(shadow.chain))
        if len(pending) > _AT_ONCE:
            return None  # it had to make room for another since it was looked at
        return run_for(work, shadow.cache.tables, start, pending)

    def _catch_up(self) -> None:
        """Compute a chunk of sequences that are not known yet, those first that were asked for first."""
        left = self._chunk
        chunks: list[tuple[Shadow, Chunk]] = []
        for sequence in self._behind:
            if sequence.status is not Status.RUNNING or left <= 0:
                continue
            shadow = self._shadows.of(sequence)
            if not self._shadows.grow(shadow, len(shadow.chain)):
                continue
            assert shadow.cache is not None
            start, tokens = self._shadows.pending(shadow, left)
            if tokens and max(tokens) < self._vocab_size:
                left -= len(tokens)
                chunk = Chunk(shadow.cache.tables, start, tokens, retention=shadow.chain.retention)
                chunks.append((shadow, chunk))
        self._behind.clear()
        if chunks:
            self._runner.compute([chunk for _, chunk in chunks])
        for shadow, chunk in chunks:
            assert shadow.cache is not None
            self.cache.commit(shadow.cache, chunk.start + len(chunk.tokens))

    def learn(self, works: Listed[Work], verdicts: Listed[Verdict]) -> None:
        """Count what was right, and roll the draft's own cache back to it."""
        for work, verdict in zip(works, verdicts, strict=True):
            if work.draft:
                self._rates.add(work.sequence, verdict.accepted, verdict.judged)
                self._shadows.settle(work.sequence, verdict.accepted)

    def tidy(self) -> None:
        """Give back the blocks of sequences that do not run any more."""
        self._shadows.tidy()
        self._rates.tidy()

    def reset(self) -> None:
        """Forget the draft's own cached blocks."""
        self.cache.reset()
