"""Exact in every quantised KV format: the same bits in a batch, in chunks, after hits, loads, preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import RealModel, bits, run

from kvstrata import SamplingParams, kernels
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import RequestOutput
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.ram import RamTier
from kvstrata.tiers.tier import StoreContext, Tier

pytestmark = [
    pytest.mark.skipif(kernels.backend() == "reference", reason="the torch reference is not batch-invariant"),
    pytest.mark.slow,
]

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
BLOCK = 16
ANSWER = SamplingParams(temperature=0, max_tokens=10, logprobs=3, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> RealModel:
    return RealModel.load(request.getfixturevalue(request.param), weights="auto")


@pytest.fixture(params=["fp8_e4m3", "int8", "int4"])
def fmt(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt(model: RealModel, length: int, start: int = 0) -> list[int]:
    return model.tokenizer.encode(TEXT)[start : start + length]


def serve(
    engine: Engine, prompts: dict[str, list[int]], params: SamplingParams = ANSWER
) -> dict[str, RequestOutput]:
    for name, ids in prompts.items():
        engine.add_request(name, ids, params)
    return run(engine)


def answer(result: RequestOutput) -> list[object]:
    return bits(result.outputs[0])


def cold(model: RealModel, fmt: str, ids: list[int]) -> list[object]:
    return answer(serve(model.engine(kv_dtype=fmt), {"x": ids})["x"])


def test_in_a_batch_and_in_chunks(model: RealModel, fmt: str) -> None:
    asked = {str(n): prompt(model, 40 + 31 * n, start=29 * n) for n in range(5)}
    results = serve(model.engine(kv_dtype=fmt, token_budget=17), asked)
    for name in ("0", "4"):
        assert answer(results[name]) == cold(model, fmt, asked[name])


def test_after_a_hit_in_the_pool(model: RealModel, fmt: str) -> None:
    ids = prompt(model, 101)
    expected = cold(model, fmt, ids)
    for boundary in (BLOCK, 3 * BLOCK, 6 * BLOCK):
        served = model.engine(kv_dtype=fmt)
        serve(served, {"first": [*ids[:boundary], 7]}, ONE)
        warm = serve(served, {"warm": ids})["warm"]
        assert warm.usage.cached_tokens == boundary
        assert answer(warm) == expected


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_with_blocks_from_a_tier(model: RealModel, fmt: str, kind: str, tmp_path: Path) -> None:
    """640 tokens cross Gemma's window."""

    def tiers(context: StoreContext) -> list[Tier]:
        if kind == "ram":
            return [RamTier(context, 256 << 20)]
        return [open_tier(f"disk://{tmp_path}/store?size=512MiB", context)]

    ids = prompt(model, 640)
    served = model.engine(kv_dtype=fmt, tiers=tiers)
    serve(served, {"first": [*ids[:-1], 7]}, ONE)
    served.drain()
    served.reset_cache()
    warm = serve(served, {"warm": ids})["warm"]
    assert warm.usage.cached_by_source[kind] == 639 // BLOCK * BLOCK
    assert answer(warm) == cold(model, fmt, ids)
    served.close()


@pytest.mark.parametrize("path", ["smollm2_path", "gemma_path"])
def test_with_layers_kept_in_bf16(path: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The last layers, and the first ones: theirs are groups of their own, in Gemma two of them."""
    layers = "0,5,-1"
    source = request.getfixturevalue(path)
    model = RealModel.load(
        source, weights="auto", apart=frozenset({0, 5, 29 if path == "smollm2_path" else 17})
    )
    settings = {"kv_dtype": "int4", "skip_layers": layers}

    def tiers(context: StoreContext) -> list[Tier]:
        return [open_tier(f"disk://{tmp_path}/store?size=512MiB", context)]

    ids = prompt(model, 640)
    cold = answer(serve(model.engine(**settings, token_budget=77), {"x": ids})["x"])  # type: ignore[arg-type]
    served = model.engine(**settings, tiers=tiers)  # type: ignore[arg-type]
    assert {group.pool.layout.format.name for group in served.cache.groups} == {"int4", "bf16"}
    serve(served, {"first": [*ids[:-1], 7]}, ONE)
    pooled = serve(served, {"pooled": ids})["pooled"]
    served.drain()
    served.reset_cache()
    loaded = serve(served, {"loaded": ids})["loaded"]
    for warm, where in ((pooled, "pool"), (loaded, "disk")):
        assert warm.usage.cached_by_source[where] == 639 // BLOCK * BLOCK
        assert answer(warm) == cold
    served.close()


def test_after_preemption(model: RealModel, fmt: str) -> None:
    asked = {str(n): prompt(model, 60 + n, start=29 * n) for n in range(4)}
    longer = SamplingParams(temperature=0, max_tokens=30, logprobs=3, ignore_eos=True)
    results = serve(model.engine(kv_dtype=fmt, blocks=16), asked, longer)
    assert sum(r.timings.preemptions for r in results.values()) > 0
    alone = serve(model.engine(kv_dtype=fmt), {"x": asked["3"]}, longer)["x"]
    assert answer(results["3"]) == answer(alone)
