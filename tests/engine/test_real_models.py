"""Warm equals cold on real models, in plain torch: up to near-ties, as its products depend on the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import RealModel, answer, assert_same, greedy, run

from kvstrata import SamplingParams

BLOCK = 16
TEXT = (
    "The harbour at Vellan Point is open to the sea on its western side and sheltered by a stone breakwater. "
    "Berths one to twelve are kept for fishing boats, and the rest for visitors, who call the office first."
)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> RealModel:
    return RealModel.load(smollm2_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> RealModel:
    return RealModel.load(gemma_path)


def prompt_of(model: RealModel, length: int) -> list[int]:
    ids = model.tokenizer.encode(TEXT * 20)
    return ids[:length]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("token_budget", [1, 7, 64])
@pytest.mark.parametrize("blocks", [5, 128])
def test_the_same_prompt_twice(smollm2: RealModel, length: int, token_budget: int, blocks: int) -> None:
    prompt = prompt_of(smollm2, length)
    cold = answer(smollm2.engine(), prompt)
    engine = smollm2.engine(blocks=blocks, token_budget=token_budget)
    for expected_hit in (0, (length - 1) // BLOCK * BLOCK):
        warm = answer(engine, prompt)
        assert warm.usage.cached_tokens == expected_hit
        assert_same(cold.outputs[0], warm.outputs[0])


def test_forked_answers_equal_solo_runs(smollm2: RealModel) -> None:
    prompt = prompt_of(smollm2, BLOCK + 3)
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=20, logprobs=2, ignore_eos=True)
    engine = smollm2.engine()
    engine.add_request("x", prompt, params)
    for output in run(engine)["x"].outputs:
        # The distribution of the last token, given all before it, from a run of its own.
        solo = answer(smollm2.engine(), prompt + output.token_ids[:-1], max_tokens=1)
        assert output.logprobs is not None
        assert solo.outputs[0].logprobs is not None
        for token, known in solo.outputs[0].logprobs[0].items():
            if token in output.logprobs[-1]:
                assert abs(output.logprobs[-1][token].logprob - known.logprob) < 1e-4


def test_preempted_answers_equal_undisturbed_ones(smollm2: RealModel) -> None:
    prompts = {f"r{n}": prompt_of(smollm2, 40 + 7 * n)[n:] for n in range(4)}
    tight, ample = smollm2.engine(blocks=12), smollm2.engine()
    for engine in (tight, ample):
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, greedy(40))
    disturbed, calm = run(tight), run(ample)
    assert sum(r.timings.preemptions for r in disturbed.values()) > 0
    for name in prompts:
        assert_same(calm[name].outputs[0], disturbed[name].outputs[0])


def test_windows_let_go_of_blocks_and_warm_equals_cold_across_them(gemma: RealModel) -> None:
    """600 tokens cross Gemma's window of 512: its window group holds no more than window and chunk."""
    prompt = prompt_of(gemma, 620)
    cold = answer(gemma.engine(token_budget=64), prompt, max_tokens=4)
    engine = gemma.engine(token_budget=64)
    answer(engine, prompt[:600], max_tokens=1)
    engine.add_request("warm", prompt, greedy(4))
    engine.step()
    held = [group.held for group in engine.cache.stats().groups]
    assert held[0] == -(-620 // BLOCK)
    assert held[1] <= -(-(511 + 64) // BLOCK) + 1
    warm = run(engine)["warm"]
    assert warm.usage.cached_tokens == 592
    assert_same(cold.outputs[0], warm.outputs[0])


def test_turn_two_of_a_chat_hits_turn_one_with_its_answer(smollm2: RealModel) -> None:
    engine = smollm2.engine()
    first = smollm2.tokenizer.encode("Name three colours.")
    turn = answer(engine, first, max_tokens=40)
    known = first + turn.outputs[0].token_ids
    again = answer(engine, known + smollm2.tokenizer.encode(" And now three animals."), max_tokens=4)
    assert again.usage.cached_tokens == (len(known) - 1) // BLOCK * BLOCK
