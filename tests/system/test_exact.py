"""Exact: token ids and log-probabilities are the same bits whatever ran beside, before, or in which pieces.

With the native kernels and packed weights, in the pool's default format. Compared as bits, both models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real import RealModel, bits, run
from scale import scaled

from kvstrata import SamplingParams, kernels
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import RequestOutput
from kvstrata.tiers.ram import RamTier

pytestmark = [
    pytest.mark.skipif(kernels.backend() == "reference", reason="the torch reference is not batch-invariant"),
    pytest.mark.slow,
]

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
BLOCK = 16
ANSWER = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> RealModel:
    return RealModel.load(request.getfixturevalue(request.param), weights="auto")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def engine(model: RealModel, **settings: object) -> Engine:
    return model.engine(kv_dtype="bf16", **settings)  # type: ignore[arg-type]


def prompts(model: RealModel, count: int, length: int = 50) -> list[list[int]]:
    ids = model.tokenizer.encode(TEXT)
    return [ids[29 * n : 29 * n + length + n % 7] for n in range(count)]


def alone(model: RealModel, prompt: list[int], params: SamplingParams = ANSWER) -> list[object]:
    return bits(serve(engine(model), {"only": prompt}, params)["only"].outputs[0])


def serve(
    engine: Engine, prompts: dict[str, list[int]], params: SamplingParams = ANSWER
) -> dict[str, RequestOutput]:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    return run(engine)


@pytest.mark.parametrize("size", [2, 7, 32])
@pytest.mark.parametrize("params", [ANSWER, DRAWN], ids=["greedy", "drawn"])
def test_alone_or_in_a_batch(model: RealModel, size: int, params: SamplingParams) -> None:
    asked = prompts(model, size)
    results = serve(engine(model, blocks=512), {str(n): p for n, p in enumerate(asked)}, params)
    for n in (0, size // 2, size - 1):
        assert bits(results[str(n)].outputs[0]) == alone(model, asked[n], params)


def test_behind_other_prompts(model: RealModel) -> None:
    asked = prompts(model, 3, length=70)
    served = engine(model, blocks=512, token_budget=40)
    for n, prompt in enumerate(asked):
        served.add_request(str(n), prompt, ANSWER)
        for _ in range(2):
            served.step()
    results = run(served)
    assert bits(results["2"].outputs[0]) == alone(model, asked[2])


@pytest.mark.parametrize("chunk", [1, 16, 17, 512])
def test_whatever_the_chunks(model: RealModel, chunk: int) -> None:
    [prompt] = prompts(model, 1, length=600 if chunk > 1 else 60)
    whole = bits(serve(engine(model, token_budget=1024), {"x": prompt})["x"].outputs[0])
    assert bits(serve(engine(model, token_budget=chunk), {"x": prompt})["x"].outputs[0]) == whole


def test_cold_or_after_a_hit_at_every_block_boundary(model: RealModel) -> None:
    length = scaled(40 * BLOCK, least=6 * BLOCK)
    [prompt] = prompts(model, 1, length=length + 3)
    cold = alone(model, prompt)
    for boundary in range(BLOCK, length + 1, BLOCK):
        served = engine(model)
        serve(served, {"first": [*prompt[:boundary], 7]}, SamplingParams(temperature=0, max_tokens=1))
        warm = serve(served, {"warm": prompt})["warm"]
        assert warm.usage.cached_tokens == boundary
        assert bits(warm.outputs[0]) == cold


def test_across_the_window(model: RealModel) -> None:
    """640 tokens cross Gemma's window; the hit ends beyond it."""
    [prompt] = prompts(model, 1, length=640)
    cold = alone(model, prompt)
    served = engine(model, token_budget=64)
    serve(served, {"first": prompt[:610]}, SamplingParams(temperature=0, max_tokens=1))
    warm = serve(served, {"warm": prompt})["warm"]
    assert warm.usage.cached_tokens == 608
    assert bits(warm.outputs[0]) == cold


@pytest.mark.parametrize("length", [33, 640])
@pytest.mark.parametrize("params", [ANSWER, DRAWN], ids=["greedy", "drawn"])
def test_cold_or_with_blocks_from_a_tier(model: RealModel, length: int, params: SamplingParams) -> None:
    """640 tokens cross Gemma's window, so that only the blocks in sight come back in its window layers."""
    [prompt] = prompts(model, 1, length=length)
    cold = alone(model, prompt, params)
    served = engine(model, tiers=lambda context: [RamTier(context, 256 << 20)])
    serve(served, {"first": [*prompt[:-1], 7]}, SamplingParams(temperature=0, max_tokens=1))
    served.drain()
    served.reset_cache()
    warm = serve(served, {"warm": prompt}, params)["warm"]
    assert warm.usage.cached_by_source["ram"] == (length - 1) // BLOCK * BLOCK
    assert bits(warm.outputs[0]) == cold
    served.close()


def test_an_audit_of_true_blocks_finds_nothing(model: RealModel) -> None:
    [prompt] = prompts(model, 1, length=100)
    served = engine(model, tiers=lambda context: [RamTier(context, 256 << 20)])
    assert served.tiering is not None
    serve(served, {"first": prompt}, ANSWER)
    served.drain()
    served.reset_cache()
    served.tiering.loads.on_loaded = served.tiering.audit.loaded
    served.tiering.audit.share = 1.0
    serve(served, {"warm": prompt}, ANSWER)
    while served.tend():
        pass
    counts = served.tiering.audit.counts
    assert (counts.checked, counts.mismatches, counts.skipped) == (6, 0, 0)


def test_after_preemption(model: RealModel) -> None:
    asked = {str(n): p for n, p in enumerate(prompts(model, 4, length=60))}
    longer = SamplingParams(temperature=0, max_tokens=30, logprobs=3, ignore_eos=True)
    results = serve(engine(model, blocks=16), asked, longer)
    assert sum(r.timings.preemptions for r in results.values()) > 0
    for name, prompt in asked.items():
        assert bits(results[name].outputs[0]) == alone(model, prompt, longer)


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="needs two threads to compare")
def test_one_thread_or_two(model: RealModel) -> None:
    [prompt] = prompts(model, 1, length=300)
    torch.set_num_threads(2)
    two = alone(model, prompt, DRAWN)
    torch.set_num_threads(1)
    assert alone(model, prompt, DRAWN) == two
