"""Draws with another model's proposals: the target's distribution, and nothing outside top-p."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from scale import scaled
from speculating import draft_model
from torch import Tensor
from toy import MakeSpeculator, make_toy

from kvstrata import SamplingParams
from kvstrata.engine.sampler import candidates
from kvstrata.models.batch import ForwardBatch

TARGET = torch.tensor([1.2, 0.3, -0.5, 2.0, 0.9, -1.0, 1.6, 0.0])
DRAFT = torch.tensor([0.2, 1.3, 0.5, 1.8, -0.9, 1.0, 0.6, 0.4])
ANSWER = 100
# p = 0.0001 by degrees of freedom: seeds are fixed, so that this never flickers.
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}


@dataclass
class Fixed:
    """The same 8 logits everywhere."""

    logits: Tensor

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.logits.repeat(len(batch.logit_rows), 1)


def draws(params: SamplingParams, count: int, speculate: MakeSpeculator | None) -> list[list[int]]:
    toy = make_toy(blocks=600, token_budget=256, speculate=speculate)
    toy.engine._runner._model = Fixed(TARGET)
    for number in range(count // ANSWER):
        own = SamplingParams(
            temperature=params.temperature, top_p=0.8, seed=number, max_tokens=ANSWER, ignore_eos=True
        )
        toy.engine.add_request(str(number), [1, 2, 3, 1 + number % 90], own)
    results = toy.run(100_000)
    if speculate is not None:
        counts = toy.engine.telemetry.speculation
        assert 0 < counts.accepted_tokens < counts.draft_tokens
    return [results[str(number)].outputs[0].token_ids for number in range(count // ANSWER)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_target_distribution_and_the_draws_of_plain_sampling(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.8)
    count = scaled(20_000, least=20_000)
    speculated = draws(params, count, draft_model(3, draft=Fixed(DRAFT), blocks=600))
    weights, ids = candidates(TARGET, params)
    assert ids is not None
    expected = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    assert 1 < len(expected) < 8
    counts = Counter(token for tokens in speculated for token in tokens)
    assert set(counts) <= set(expected), "nothing outside top-p"
    total = sum(counts.values())
    assert total == count
    chi_square = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in expected.items())
    assert chi_square < CRITICAL[len(expected) - 1]
    assert speculated == draws(params, count, None), "a seed's draws do not depend on proposals"
