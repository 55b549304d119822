"""One prompt of 500 tokens under three retentions, in any order, from pool and disk: each as if alone.

K and V of later tokens depend on what was hidden from earlier ones, so blocks are shared only up to there.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
from real import RealModel, bits, run

from kvstrata import SamplingParams, kernels
from kvstrata.cache.retention import Retention
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import RequestOutput
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.tier import StoreContext, Tier

pytestmark = pytest.mark.skipif(
    kernels.backend() == "reference", reason="the torch reference is not batch-invariant"
)

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
BLOCK, LENGTH = 16, 500
RETENTIONS = ("full", "window:64", "sinks:4+60")


@cache
def load(path: Path) -> RealModel:
    return RealModel.load(path, weights="auto")


def serve(engine: Engine, ids: list[int], retention: str) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True, retention=retention)
    engine.add_request("x", ids, params)
    return run(engine)["x"]


@cache
def prompt(path: Path) -> list[int]:
    return load(path).tokenizer.encode(TEXT)[:LENGTH]


@cache
def cold(path: Path, retention: str) -> list[object]:
    result = serve(load(path).engine(), prompt(path), retention)
    assert result.usage.cached_tokens == 0
    return bits(result.outputs[0])


@pytest.fixture(params=["smollm2_path", "gemma_path"])
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def shared_tokens(first: str, second: str) -> int:
    """Tokens of whole blocks in which neither hides anything."""
    ends = [Retention.parse(each).unhidden for each in (first, second)]
    return min(LENGTH if end is None else end for end in ends) // BLOCK * BLOCK


@pytest.mark.parametrize("order", list(permutations(RETENTIONS)), ids="-".join)
def test_in_the_pool_each_is_as_if_alone(path: Path, order: tuple[str, ...]) -> None:
    engine = load(path).engine(blocks=160)
    for place, retention in enumerate(order):
        result = serve(engine, prompt(path), retention)
        assert bits(result.outputs[0]) == cold(path, retention)
        expected = max((shared_tokens(retention, before) for before in order[:place]), default=0)
        # What slipped out of a window is still there; a hit under a window may need more than is shared.
        assert result.usage.cached_tokens == expected
    for retention in order:
        again = serve(engine, prompt(path), retention)
        assert again.usage.cached_tokens == (LENGTH - 1) // BLOCK * BLOCK
        assert bits(again.outputs[0]) == cold(path, retention)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("order", list(permutations(RETENTIONS)), ids="-".join)
def test_from_disk_each_is_as_if_alone(path: Path, order: tuple[str, ...], folder: Path) -> None:
    def tiers(context: StoreContext) -> list[Tier]:
        return [open_tier(f"disk://{folder}?size=512MiB", context)]

    engine = load(path).engine(blocks=160, tiers=tiers)
    for retention in order:
        assert bits(serve(engine, prompt(path), retention).outputs[0]) == cold(path, retention)
    engine.drain()
    for retention in order:
        engine.reset_cache()
        loaded_before = engine.tiering.loads.counts.used if engine.tiering is not None else 0
        result = serve(engine, prompt(path), retention)
        assert result.usage.cached_by_source["disk"] == (LENGTH - 1) // BLOCK * BLOCK
        assert bits(result.outputs[0]) == cold(path, retention)
        assert engine.tiering is not None
        loaded = engine.tiering.loads.counts.used - loaded_before
        groups = [group.window for group in engine.cache.groups]
        end = (LENGTH - 1) // BLOCK
        visible = [
            len(list(Retention.parse(retention).within(window).visible_blocks(end, BLOCK)))
            for window in groups
        ]
        assert loaded == sum(visible), "only what the next token sees is loaded"
    engine.close()
