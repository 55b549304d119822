"""Sampling: what may be drawn, how often, and that a draw depends on its own coordinates only."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kvstrata import SamplingParams
from kvstrata.engine.sampler import SampleInput, adjust, candidates, rank_tokens, sample, uniform


def item(params: SamplingParams, *, prompt=(), output=(), seed=1, index=0, stop=()) -> SampleInput:  # type: ignore[no-untyped-def]
    return SampleInput(params, list(prompt), list(output), seed, index, frozenset(stop))


def allowed(probabilities: list[float], params: SamplingParams) -> dict[int, float]:
    weights, ids = candidates(torch.tensor(probabilities).log(), params)
    names = range(len(weights)) if ids is None else ids.tolist()
    return dict(zip(names, (weights / weights.sum()).tolist(), strict=True))


PROBABILITIES = [0.05, 0.4, 0.25, 0.1, 0.2]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), {0, 1, 2, 3, 4}),
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.6), {1, 2}),
        (SamplingParams(top_p=0.66), {1, 2, 4}),
        (SamplingParams(top_p=1e-9), {1}),
        (SamplingParams(min_p=0.49), {1, 2, 4}),
        (SamplingParams(min_p=1.0), {1}),
        (SamplingParams(top_k=3, top_p=0.5), {1, 2}),  # top_p of what top_k left: 0.4 / 0.85 is below a half
        (SamplingParams(top_k=-1), {0, 1, 2, 3, 4}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
    ],
)
def test_what_may_be_drawn(params: SamplingParams, kept: set[int]) -> None:
    assert set(allowed(PROBABILITIES, params)) == kept


def test_temperature_sharpens_before_top_p_cuts() -> None:
    cold = allowed(PROBABILITIES, SamplingParams(temperature=0.25, top_p=0.8))
    warm = allowed(PROBABILITIES, SamplingParams(temperature=4.0, top_p=0.8))
    assert set(cold) == {1}
    assert len(warm) == 4


def test_ties_at_the_edge_go_to_the_lower_id() -> None:
    assert set(allowed([0.2, 0.2, 0.2, 0.2, 0.2], SamplingParams(top_k=2))) == {0, 1}


def test_top_p_over_a_large_flat_vocabulary() -> None:
    flat = [1 / 5000] * 5000
    assert len(allowed(flat, SamplingParams(top_p=0.5))) in (2500, 2501)


@pytest.mark.parametrize(
    "params", [SamplingParams(seed=0), SamplingParams(seed=0, temperature=0.7, top_p=0.9)]
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([PROBABILITIES]).log()
    draws = 20_000
    counts = Counter(sample(logits, [item(params, output=[0] * n, seed=n)])[0] for n in range(draws // 100))
    for seed in range(99):
        for n in range(draws // 100):
            counts[sample(logits, [item(params, output=[0] * n, seed=1000 + seed)])[0]] += 1
    expected = allowed(PROBABILITIES, params)
    assert set(counts) <= set(expected)
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    assert chi_square < 23.5  # 4 degrees of freedom, p = 0.0001: the seeds are fixed, so this never flickers


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    items = [item(SamplingParams(temperature=0.5 + 0.3 * i, top_p=0.9, seed=i), seed=i) for i in range(5)]
    together = sample(logits, items)
    assert together == [sample(logits[i : i + 1], [items[i]])[0] for i in range(5)]
    assert sample(logits.flip(0), items[::-1]) == together[::-1]


def test_random_numbers_differ_by_seed_answer_and_place() -> None:
    numbers = {uniform(s, a, i) for s in range(5) for a in range(5) for i in range(5)}
    assert len(numbers) == 125
    assert all(0 <= n < 1 for n in numbers)
    assert uniform(3, 1, 4) == uniform(3, 1, 4)


def test_zero_probability_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    params = SamplingParams(temperature=2.0)
    assert {sample(logits, [item(params, seed=n)])[0] for n in range(200)} == {0, 2}


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), [item(SamplingParams(temperature=0))]) == [1]


def test_penalties() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5])
    repeated = adjust(logits, item(SamplingParams(repetition_penalty=2.0), prompt=[0, 1], output=[3, 3]))
    assert repeated.tolist() == [0.5, -2.0, 2.0, 0.25]
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust(logits, item(params, prompt=[2], output=[3, 3, 0])).tolist() == [0.25, -1.0, 2.0, -0.5]
    assert logits.tolist() == [1.0, -1.0, 2.0, 0.5]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0, min_tokens=2)
    assert sample(logits, [item(params, stop=[0])]) == [1]
    assert sample(logits, [item(params, output=[1, 1], stop=[0])]) == [0]


def test_ranks_and_log_probabilities() -> None:
    logits = torch.tensor([PROBABILITIES]).log()
    [listed] = rank_tokens(logits, [0], top=2)
    assert [(r.token, r.rank) for r in listed] == [(1, 1), (2, 2), (0, 5)]
    assert [r.logprob for r in listed] == pytest.approx([math.log(p) for p in (0.4, 0.25, 0.05)])
    [listed] = rank_tokens(logits, [1], top=2)
    assert [(r.token, r.rank) for r in listed] == [(1, 1), (2, 2)]
    [only] = rank_tokens(logits, [4], top=0)
    assert [(r.token, r.rank) for r in only] == [(4, 3)]


@pytest.mark.parametrize("temperature", [1e-9, 1e-300, 5e-324])
def test_the_smallest_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[-3.0, 25.0, 20.0, -40.0]])
    assert sample(logits, [item(SamplingParams(temperature=temperature))]) == [1]


def test_a_stop_token_past_the_models_head_bans_nothing() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    banned = adjust(logits, item(SamplingParams(min_tokens=1), stop=(1, 3)))
    assert banned.tolist() == [1.0, -math.inf, 2.0]
