"""Toys that speculate in each way, always as far as they may."""

from __future__ import annotations

import torch
from toy import VOCAB, MakeSpeculator, ToyModel

from kvstrata.cache.manager import KVCache
from kvstrata.engine.runner import Model, Runner
from kvstrata.engine.speculation.costs import Point, StepCosts
from kvstrata.engine.speculation.draft_model import ModelDrafter
from kvstrata.engine.speculation.layers import LayersDrafter
from kvstrata.engine.speculation.ngram import NgramDrafter
from kvstrata.engine.speculation.speculator import Speculator

CPU = torch.device("cpu")


def flat_costs() -> StepCosts:
    """Steps that take a second, whatever their rows."""
    return StepCosts([Point(1, 1.0, 1.0)], 1)


def ngram(most: int = 5) -> MakeSpeculator:
    def make(model: ToyModel, cache: KVCache, token_budget: int) -> Speculator:
        return Speculator(NgramDrafter(), flat_costs(), most=most, adaptive=False)

    return make


def layers(most: int = 5, *, wrong_one_in: int = 0, vocab: int = VOCAB) -> MakeSpeculator:
    """Proposals over the target's own blocks. wrong_one_in: see `ToyModel`; 0 is the target itself."""

    def make(model: ToyModel, cache: KVCache, token_budget: int) -> Speculator:
        runner = Runner(ToyModel(model.windows, wrong_one_in=wrong_one_in), cache, CPU)
        drafter = LayersDrafter(runner, flat_costs(), vocab)
        return Speculator(drafter, flat_costs(), most=most, adaptive=False)

    return make


def draft_model(
    most: int = 5, *, wrong_one_in: int = 0, blocks: int = 64, max_len: int = 512, draft: Model | None = None
) -> MakeSpeculator:
    """Proposals from a cache of its own. draft: another model than a toy."""

    def make(model: ToyModel, cache: KVCache, token_budget: int) -> Speculator:
        own = KVCache(
            [group.pool.layout for group in cache.groups],
            [blocks] * len(cache.groups),
            fingerprint=b"draft".ljust(32, b"."),
            device=CPU,
            max_chunk=max(token_budget, 16 + most),
            clock=cache.clock,
        )
        runner = Runner(draft or ToyModel(model.windows, wrong_one_in=wrong_one_in), own, CPU)
        drafter = ModelDrafter(
            runner,
            own,
            flat_costs(),
            flat_costs(),
            vocab_size=VOCAB,
            max_len=max_len,
            chunk=token_budget,
            adaptive=False,
        )
        return Speculator(drafter, flat_costs(), most=most, adaptive=False)

    return make


WAYS = {
    "ngram": ngram(),
    "layers": layers(wrong_one_in=4),
    "draft model": draft_model(wrong_one_in=4),
    "itself": draft_model(),
}
