"""A model proposes: one forward pass for each token, of all sequences together.

Each token is drawn as the target model's will be, from logits that penalties, temperature, top-k, top-p and
min-p were applied to alike, and with the same random number: given that, the proposal is a certain one, and
where the two distributions agree the draws do. (Of all couplings of two draws this is one that needs no
message between them; Daliri, Musco and Suresh, arXiv 2408.07978.)
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvstrata.cache.retention import Retention
from kvstrata.cache.table import BlockTable
from kvstrata.engine.runner import Chunk, Runner
from kvstrata.engine.sampler import SampleInput, sample
from kvstrata.engine.settle import sample_input
from kvstrata.engine.speculation.costs import Span, StepCosts
from kvstrata.engine.work import Work


@dataclass
class Run:
    """The tokens that are proposed for one sequence.

    tables: blocks of each layer group, which cover all that is computed. start, pending: position and ids of
    the tokens that are still to be computed. room: most tokens to propose. item: what a draw depends on,
    with output ids that take the proposed ones too. retention: the sequence's.
    """

    tables: Sequence[BlockTable]
    start: int
    pending: array[int]
    room: int
    item: SampleInput
    outputs: list[int]
    retention: Retention
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int) -> None:
        """A token was drawn; it is to be computed next."""
        self.start += len(self.pending)
        self.pending = array("I", (token,))
        self.outputs.append(token)
        self.tokens.append(token)

    @property
    def goes_on(self) -> bool:
        """Whether another token is to be proposed: nothing comes after a token that ends the answer."""
        return len(self.tokens) < self.room and self.tokens[-1] not in self.item.stop_ids


def run_for(work: Work, tables: Sequence[BlockTable], start: int, pending: array[int]) -> Run:
    """A run for a scheduled work."""
    item, outputs = sample_input(work.sequence), list(work.sequence.output_ids)
    item = replace(item, output_ids=outputs)
    return Run(tables, start, pending, work.room, item, outputs, work.sequence.chain.retention)


def propose(runner: Runner, runs: Sequence[Run], costs: StepCosts, vocab_size: int) -> None:
    """Fill the runs with tokens, and tell `costs` what they took. vocab_size: ids that the target knows."""
    active = list(runs)
    while active:
        begin = time.perf_counter()
        spans = [Span(len(run.pending), run.start) for run in active]
        chunks = [Chunk(run.tables, run.start, run.pending, retention=run.retention) for run in active]
        logits = runner.compute(chunks).logits
        finite: list[bool] = torch.isfinite(logits.sum(-1)).tolist()
        if not all(finite):
            active = [run for run, fine in zip(active, finite, strict=True) if fine]
            logits = logits[finite]
        tokens = sample(logits[:, :vocab_size], [run.item for run in active]) if active else []
        for run, token in zip(active, tokens, strict=True):
            run.take(token)
        active = [run for run in active if run.goes_on]
        if all(span.rows == 1 for span in spans):
            costs.observe(spans, time.perf_counter() - begin)
