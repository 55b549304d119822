"""Sinks 4, window 16, 64 tokens, one at a time, in chunks of 5, and whole: as raw keys rotated at use."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from real import RealModel, run
from retained_oracle import logprobs
from torch import Tensor

from kvstrata import SamplingParams
from kvstrata.cache.retention import Retention

RETENTION = Retention(4, 16)
LENGTH = 64
TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
# Nats, of any token and on average. Both sides round their products in other orders. Where keys and values
# are codes, one on the edge between two becomes this here and that there: a whole step, which later layers
# carry on. Over a bf16 pool the kernels round queries and probabilities to bf16 as well, which the oracle,
# whose queries stand at other positions, does not.
TOLERANCE = {"fp32": 2e-4, "bf16": 0.04, "fp16": 0.01, "fp8_e4m3": 0.7, "int8": 0.15, "int4": 1.3}
MEAN_TOLERANCE = {"fp32": 4e-5, "bf16": 0.008, "fp16": 0.001, "fp8_e4m3": 0.07, "int8": 0.02, "int4": 0.2}


@cache
def load(path: Path) -> RealModel:
    return RealModel.load(path, "fp32")


@cache
def expected(path: Path, kv_dtype: str = "fp32", retention: Retention = RETENTION) -> Tensor:
    """Of the oracle: log-probabilities after each token, `[num_tokens, vocab_size]`."""
    model = load(path)
    return logprobs(model.decoder, model.tokenizer.encode(TEXT)[:LENGTH], retention, kv_dtype)


def error(path: Path, chunk: int, kv_dtype: str = "fp32", retention: Retention = RETENTION) -> Tensor:
    """Engine against oracle: of the log-probability of each token but the first, `[num_tokens - 1]`."""
    model = load(path)
    ids = model.tokenizer.encode(TEXT)[:LENGTH]
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, retention=str(retention), ignore_eos=True
    )
    engine = model.engine(kv_dtype=kv_dtype, token_budget=chunk)
    engine.add_request("x", ids, params)
    result = run(engine)["x"]
    assert result.prompt_logprobs is not None
    got = [ranked[token].logprob for token, ranked in zip(ids[1:], result.prompt_logprobs[1:], strict=True)]
    oracle = expected(path, kv_dtype, retention)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return (torch.tensor(got) - oracle).abs()


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("kv_dtype", list(TOLERANCE))
def test_the_engine_equals_the_oracle_in_every_format(smollm2_path: Path, kv_dtype: str, chunk: int) -> None:
    off = error(smollm2_path, chunk, kv_dtype)
    assert off.max() < TOLERANCE[kv_dtype]
    assert off.mean() < MEAN_TOLERANCE[kv_dtype]


@pytest.mark.parametrize("retention", [Retention(0, 16), Retention(4, 1), Retention(40, 3)])
@pytest.mark.parametrize("chunk", [5, 512])
def test_other_retentions_equal_the_oracle(smollm2_path: Path, retention: Retention, chunk: int) -> None:
    assert error(smollm2_path, chunk, retention=retention).max() < TOLERANCE["fp32"]


@pytest.mark.parametrize("chunk", [5, 512])
def test_layers_with_a_window_of_their_own_keep_it(gemma_path: Path, chunk: int) -> None:
    assert error(gemma_path, chunk).max() < TOLERANCE["fp32"]


def test_the_retention_matters_from_where_it_hides_something_on(smollm2_path: Path) -> None:
    changes = (expected(smollm2_path) - expected(smollm2_path, retention=Retention())).abs().amax(
        dim=1
    ) > 1e-3
    assert not changes[: RETENTION.unhidden].any()
    assert changes[RETENTION.unhidden :].any()
