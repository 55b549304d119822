"""Tiers through the front door, on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata import LLM, RequestOptions, SamplingParams, kernels
from kvstrata.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(
        str(smollm2_path),
        kv_memory="32MiB",
        max_model_len=512,
        tiers=["ram://?size=128MiB"],
        load_mode="always",
        audit=1.0 if kernels.backend() != "reference" else 0.0,
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def integrity(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.cache.check_integrity()


def test_what_the_pool_forgot_comes_from_ram_and_says_so(llm: LLM) -> None:
    [first] = llm.generate(PROMPT, GREEDY)
    llm.engine.drain()
    llm.engine.reset_cache()
    [again] = llm.generate(PROMPT, GREEDY)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.usage.cached_by_source["ram"] == again.usage.cached_tokens > 64
    [load] = again.timings.loads
    assert load.tier == "ram"
    assert load.bytes == load.blocks * llm.engine.cache.pools[0].layout.payload_bytes
    assert load.seconds > 0
    while llm.engine.tend():
        pass
    assert llm.engine.tiering is not None
    stats = llm.engine.tiering.stats()
    assert stats.audit.mismatches == 0
    assert stats.tiers[0].usage.loads == load.blocks
    assert stats.seconds_per_prefill_token is not None


def test_a_start_tells_how_quick_prefill_and_tiers_are(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path), kv_memory="32MiB", max_model_len=512, tiers=["ram://?size=64MiB"]) as fresh:
        assert fresh.engine.tiering is not None
        stats = fresh.engine.tiering.stats()
    assert stats.seconds_per_prefill_token is not None
    assert stats.tiers[0].load is not None
    assert stats.tiers[0].usage.loads == 0


def test_a_pin_computes_what_is_not_there_and_is_undone(llm: LLM) -> None:
    prompt = "Pinned: " + PROMPT
    options = RequestOptions(cache_salt="somebody")
    held = llm.pin(prompt, ttl=100.0, options=options)
    assert held == len(llm.tokenizer.encode(prompt)) // 16 * 16
    assert not llm.unpin(prompt), "another salt's"
    assert llm.unpin(prompt, options=options)
    assert not llm.unpin(prompt, options=options)
    assert llm.pin(messages=[{"role": "user", "content": PROMPT}]) > 0


@pytest.mark.parametrize("ttl", [0, -1.0, "long"])
def test_a_pin_for_no_time_is_refused(llm: LLM, ttl: object) -> None:
    with pytest.raises(RequestError, match="seconds above 0"):
        llm.pin(PROMPT, ttl=ttl)  # type: ignore[arg-type]


def test_tiers_that_cannot_be_are_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="the kinds are disk, ram"):
        LLM("no such model", tiers=["tape://x"])
    with pytest.raises(ConfigError, match="need prefix_caching"):
        LLM(tiers=["ram://?size=1GiB"], prefix_caching=False)
    with pytest.raises(ConfigError, match="list of URLs"):
        LLM(tiers=[3])


def test_after_close_answers_go_on_without_tiers(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), kv_memory="32MiB", max_model_len=512, tiers=["ram://?size=64MiB"])
    [first] = llm.generate(PROMPT, GREEDY)
    llm.close()
    llm.engine.reset_cache()
    [again] = llm.generate(PROMPT, GREEDY)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.usage.cached_tokens == 0
    llm.close()
