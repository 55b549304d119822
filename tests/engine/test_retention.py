"""Requests with retentions through the engine: limits, defaults, pins, neighbours of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import RealModel, bits, run
from toy import Toy, make_toy

from kvstrata import RequestOptions, SamplingParams, kernels
from kvstrata.cache.retention import Retention
from kvstrata.engine.limits import Limits
from kvstrata.errors import RequestError

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
PROMPT = [1 + i % 90 for i in range(60)]


def ask(toy: Toy, prompt: list[int], retention: str | None, max_tokens: int = 8) -> tuple[int, list[int]]:
    """Cached tokens, and the answer."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, retention=retention, ignore_eos=True)
    toy.engine.add_request("x", prompt, params)
    result = toy.run()["x"]
    return result.usage.cached_tokens, result.outputs[0].token_ids


def test_the_engines_retention_is_that_of_requests_that_bring_none() -> None:
    toy = make_toy(retention=Retention(2, 10))
    _, answer = ask(toy, PROMPT, None)
    cached, again = ask(toy, PROMPT, "sinks:2+10")
    assert (cached, again) == (56, answer)
    cached, other = ask(toy, PROMPT, "full")
    assert cached == 12, "up to where the sinks and the window hid nothing"
    assert other != answer


def test_a_full_request_keeps_the_models_limit_beside_streams() -> None:
    toy = make_toy(max_model_len=64, retention=Retention(0, 10))
    assert len(ask(toy, PROMPT, None, max_tokens=40)[1]) == 40
    assert len(ask(toy, PROMPT, "full", max_tokens=40)[1]) == 4
    with pytest.raises(RequestError, match="at most 64 fit"):
        toy.engine.add_request("long", PROMPT * 2, SamplingParams(retention="full"))


def test_a_length_that_was_set_limits_streams_too() -> None:
    cache = make_toy().cache
    limits = Limits(cache, 64, 100, 64, Retention(0, 10))
    assert limits.longest(Retention(0, 10)) == 100
    assert limits.longest(Retention()) == 64
    with pytest.raises(RequestError, match="at most 100 fit"):
        limits.check(100, Retention(0, 10))
    assert limits.limit(90, None, Retention(0, 10)) == 100
    assert limits.limit(90, 5, Retention(0, 10)) == 95


@pytest.mark.parametrize("retention", ["window:10", "sinks:6+9"])
def test_a_pinned_prompt_outlives_what_would_evict_it(retention: str) -> None:
    toy = make_toy(blocks=40, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=1, retention=retention)
    _, answer = ask(toy, PROMPT, retention)
    extras = toy.engine.extras(RequestOptions(), params)
    assert toy.engine.pin(PROMPT, extras) == 60
    toy.cache.check_integrity()
    for start in range(5):
        ask(toy, [91 + start % 5, *range(1, 60)], None)
    cached, again = ask(toy, PROMPT, retention)
    assert (cached, again) == (56, answer)
    assert toy.engine.unpin(PROMPT, extras)
    toy.assert_idle()


@pytest.mark.skipif(kernels.backend() == "reference", reason="the torch reference is not batch-invariant")
@pytest.mark.parametrize("kv_dtype", ["bf16", "int4"])
def test_neighbours_of_other_retentions_change_no_bit(smollm2_path: Path, kv_dtype: str) -> None:
    model = RealModel.load(smollm2_path, weights="auto")
    ids = model.tokenizer.encode(TEXT)[:150]
    retentions = ("full", "window:20", "sinks:4+28", "sinks:40+10", "window:1")
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True, retention=retention)
        for retention in retentions
    ]
    together = model.engine(kv_dtype=kv_dtype, token_budget=64)
    for number, own in enumerate(params):
        together.add_request(str(number), ids[number:], own)
    results = run(together)
    for number, own in enumerate(params):
        alone = model.engine(kv_dtype=kv_dtype)
        alone.add_request("x", ids[number:], own)
        assert bits(run(alone)["x"].outputs[0]) == bits(results[str(number)].outputs[0]), retentions[number]
