"""Exact: with proposals accepted and rejected, ids and log-probabilities are the same bits as without any.

With the native kernels and packed weights. Drafts are the text's own n-grams, two thirds of the layers, and
the model itself with weights in another format, in a cache of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real import CPU, MakeSpeculator, RealModel, bits, run

from kvstrata import SamplingParams, kernels
from kvstrata.cache.manager import KVCache
from kvstrata.config import KV_DTYPES
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import RequestOutput
from kvstrata.engine.runner import Runner
from kvstrata.engine.speculation.costs import Point, StepCosts
from kvstrata.engine.speculation.draft_model import ModelDrafter
from kvstrata.engine.speculation.drafter import Drafter
from kvstrata.engine.speculation.layers import LayersDrafter
from kvstrata.engine.speculation.ngram import NgramDrafter
from kvstrata.engine.speculation.speculator import Speculator
from kvstrata.models.decoder import Decoder
from kvstrata.tiers.ram import RamTier

pytestmark = [
    pytest.mark.skipif(kernels.backend() == "reference", reason="the torch reference is not batch-invariant"),
    pytest.mark.slow,
]

CODE = """def area(width, height):
    return width * height


def volume(width, height, depth):
    return width * height * depth


def area(width, height):
    return"""
ANSWER = SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.05,
    frequency_penalty=0.1,
    seed=5,
    max_tokens=24,
    logprobs=3,
    ignore_eos=True,
    n=2,
)
WAYS = ["ngram", "layers", "draft model", "itself"]


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def model(path: Path) -> RealModel:
    return RealModel.load(path, weights="auto")


@pytest.fixture(scope="module")
def other(path: Path) -> Decoder:
    return RealModel.load(path, weights="int8").decoder


def speculating(way: str, draft: Decoder) -> MakeSpeculator:
    def make(target: Decoder, cache: KVCache) -> Speculator:
        costs = StepCosts([Point(1, 1.0, 1.0)], 1)
        drafter: Drafter = NgramDrafter()
        if way == "layers":
            first = target.first_layers(target.config.num_layers * 2 // 3)
            drafter = LayersDrafter(Runner(first, cache, CPU), costs, target.config.vocab_size)
        elif way != "ngram":
            own = KVCache(
                [group.pool.layout for group in cache.groups],
                [group.pool.num_blocks for group in cache.groups],
                fingerprint=b"draft".ljust(32),
                device=CPU,
                max_chunk=512,
            )
            drafter = ModelDrafter(
                Runner(target if way == "itself" else draft, own, CPU),
                own,
                costs,
                costs,
                vocab_size=target.config.vocab_size,
                max_len=2048,
                chunk=512,
                adaptive=False,
            )
        return Speculator(drafter, costs, most=4, adaptive=False)

    return make


def prompts(model: RealModel) -> dict[str, list[int]]:
    ids = model.tokenizer.encode(CODE)
    return {"code": ids, "part": ids[: len(ids) // 2], "again": ids[5:]}


def serve(
    engine: Engine, asked: dict[str, list[int]], params: SamplingParams
) -> tuple[dict[str, list[list[object]]], dict[str, RequestOutput]]:
    for name, prompt in asked.items():
        engine.add_request(name, prompt, params)
    results = run(engine)
    return {name: [bits(o) for o in result.outputs] for name, result in results.items()}, results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("params", [ANSWER, DRAWN], ids=["greedy", "drawn"])
def test_the_same_bits_as_without(model: RealModel, other: Decoder, way: str, params: SamplingParams) -> None:
    asked = prompts(model)
    expected, _ = serve(model.engine(kv_dtype="bf16"), asked, params)
    engine = model.engine(kv_dtype="bf16", speculate=speculating(way, other))
    assert serve(engine, asked, params)[0] == expected
    counts = engine.telemetry.speculation
    assert counts.draft_tokens > 0
    if way == "itself":
        assert counts.acceptance == 1.0
    elif way == "draft model":
        assert counts.accepted_tokens > 0


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("way", ["layers", "draft model"])
def test_in_every_kv_format(model: RealModel, other: Decoder, way: str, kv_dtype: str) -> None:
    asked = prompts(model)
    expected, _ = serve(model.engine(kv_dtype=kv_dtype), asked, ANSWER)
    engine = model.engine(kv_dtype=kv_dtype, speculate=speculating(way, other))
    assert serve(engine, asked, ANSWER)[0] == expected


@pytest.mark.parametrize("way", WAYS)
def test_preempted_and_with_hits_from_pool_and_tier(model: RealModel, other: Decoder, way: str) -> None:
    """What was computed while speculating is stored, and serves others as if it had been computed without."""
    asked = prompts(model)
    asked |= {f"short {n}": asked["code"][n : n + 10] for n in range(4)}  # admitted all, to grow together
    longer = SamplingParams(temperature=0, max_tokens=40, logprobs=3, ignore_eos=True)
    expected, plain = serve(model.engine(kv_dtype="bf16"), asked, longer)
    engine = model.engine(
        kv_dtype="bf16",
        blocks=9,
        speculate=speculating(way, other),
        tiers=lambda context: [RamTier(context, 64 << 20)],
    )
    got, results = serve(engine, asked, longer)
    assert got == expected
    assert sum(result.timings.preemptions for result in results.values()) > 0
    # A second turn: prompt and answer are found, in the pool or in the tier.
    turn = {"turn": [*asked["code"], *plain["code"].outputs[0].token_ids, 7, 8, 9]}
    cold, _ = serve(model.engine(kv_dtype="bf16"), turn, ANSWER)
    for reset in (False, True):
        engine.drain()
        if reset:
            engine.reset_cache()
        warm, results = serve(engine, turn, ANSWER)
        assert warm == cold
        assert results["turn"].usage.cached_tokens >= len(asked["code"]) // 16 * 16
    engine.close()
