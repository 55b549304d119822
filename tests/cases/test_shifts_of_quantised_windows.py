"""A window moves over a quantised pool: keys are stored once and never turned, so errors do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real import RealModel

from kvstrata import SamplingParams
from kvstrata.cache.retention import Retention
from kvstrata.engine.engine import Engine

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
BLOCK = 16
RETENTION = Retention(4, 60)
SHIFTS = 20


def step_by_step(engine: Engine, ids: list[int], chunk: int) -> list[float]:
    """Log-probabilities of all tokens but the first, with the sinks' bytes checked at every step."""
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, retention=str(RETENTION), ignore_eos=True
    )
    engine.add_request("x", ids, params)
    sinks, result = None, None
    while engine.has_unfinished:
        running = engine.scheduler.running
        before = list(running[0].cache.tables[0]) if running and running[0].cache else []
        for delta in engine.step():
            result = delta.result or result
        engine.cache.check_integrity()
        if before and engine.scheduler.running:
            table = engine.scheduler.running[0].cache.tables[0]  # type: ignore[union-attr]
            held = sum(block >= 0 for block in table)
            assert held <= (RETENTION.most_blocks(chunk, BLOCK) or 0)
            now = engine.cache.pools[0].payload(table[0]).clone()
            assert sinks is None or sinks.equal(now)
            sinks = now
    assert result is not None
    assert result.prompt_logprobs is not None
    return [ranked[t].logprob for t, ranked in zip(ids[1:], result.prompt_logprobs[1:], strict=True)]


@pytest.mark.parametrize("chunk", [BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8_e4m3"])
def test_twenty_shifts_leave_the_error_where_it_was(smollm2_path: Path, kv_dtype: str, chunk: int) -> None:
    """In steps of 48 tokens three blocks slip out at once, before the next forward."""
    model = RealModel.load(smollm2_path, weights="auto")
    ids = model.tokenizer.encode(TEXT)[: RETENTION.sinks + 60 + SHIFTS * 3 * BLOCK]
    exact = step_by_step(model.engine(kv_dtype="fp32", token_budget=chunk), ids, chunk)
    rounded = step_by_step(model.engine(kv_dtype=kv_dtype, token_budget=chunk), ids, chunk)
    error = (torch.tensor(exact) - torch.tensor(rounded)).abs()
    assert error.isfinite().all()
    third = len(error) // 3
    first, last = error[64:third].mean(), error[-third:].mean()
    assert last < 1.5 * first
