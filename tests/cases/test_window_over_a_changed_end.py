"""Window 32 over a prompt of 80 tokens, sent twice, and then with its last 5 tokens changed: as cold."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import RealModel, bits, run

from kvstrata import SamplingParams, kernels
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import RequestOutput

pytestmark = pytest.mark.skipif(
    kernels.backend() == "reference", reason="the torch reference is not batch-invariant"
)

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()


def serve(engine: Engine, ids: list[int], retention: str) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True, retention=retention)
    engine.add_request("x", ids, params)
    return run(engine)["x"]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("retention", ["window:32", "sinks:4+28", "sinks:20+3"])
def test_a_second_prompt_and_a_changed_one_equal_cold(
    smollm2_path: Path, kv_dtype: str, retention: str
) -> None:
    model = RealModel.load(smollm2_path, weights="auto")
    ids = model.tokenizer.encode(TEXT)[:80]
    changed = [*ids[:75], *ids[:5]]
    engine = model.engine(kv_dtype=kv_dtype, blocks=24, token_budget=48)
    for asked, cached in ((ids, 0), (ids, 64), (changed, 64)):
        result = serve(engine, asked, retention)
        assert result.usage.cached_tokens == cached
        cold = serve(model.engine(kv_dtype=kv_dtype), asked, retention)
        assert bits(result.outputs[0]) == bits(cold.outputs[0])
