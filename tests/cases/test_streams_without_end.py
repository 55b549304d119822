"""A stream under a retention: as many blocks at its end as at its beginning, past the model's length."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scale import scaled
from toy import make_toy

from kvstrata import LLM, SamplingParams
from kvstrata.cache.retention import Retention
from kvstrata.engine.stream import TextStream
from kvstrata.errors import RequestError

TEXT = (Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt").read_text()
BLOCK, BUDGET = 4, 16


@pytest.mark.parametrize("retention", ["window:10", "sinks:2+10", "sinks:9+3"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_prompt_and_answer_past_the_models_length_hold_a_constant_number_of_blocks(
    retention: str, prefix_caching: bool, windows: tuple[int | None, ...]
) -> None:
    most = Retention.parse(retention).most_blocks(BUDGET, BLOCK) or 0
    toy = make_toy(
        blocks=most + 8,
        block_size=BLOCK,
        token_budget=BUDGET,
        max_model_len=64,
        windows=windows,
        prefix_caching=prefix_caching,
    )
    prompt = [1 + i % 90 for i in range(400)]
    params = SamplingParams(temperature=0, max_tokens=200, retention=retention, ignore_eos=True)
    toy.engine.add_request("stream", prompt, params)
    held, result = [], None
    while toy.engine.has_unfinished:
        for delta in toy.step():
            result = delta.result or result
        held.append(toy.cache.stats().groups[0].held)
    assert result is not None
    assert len(result.outputs[0].token_ids) == 200
    assert max(held) <= most
    reached = held[5:-1]
    assert max(reached) - min(reached) <= BUDGET // BLOCK + 1, "as many blocks at the end as at the beginning"
    toy.assert_idle()


def test_a_stream_ends_its_answer_where_nothing_else_would() -> None:
    toy = make_toy(blocks=32, block_size=BLOCK, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=None, retention="window:10", ignore_eos=True)
    toy.engine.add_request("stream", list(range(1, 91)), params)
    assert len(toy.run()["stream"].outputs[0].token_ids) == 64


def test_a_stream_that_the_pool_cannot_hold_is_refused_at_once() -> None:
    toy = make_toy(blocks=5, block_size=BLOCK, token_budget=BUDGET)
    with pytest.raises(RequestError, match="KV pool holds 20"):
        toy.engine.add_request("stream", [1] * 100, SamplingParams(retention="window:100"))


def test_many_streams_fit_where_a_few_full_sequences_would() -> None:
    """Admission promises what the retention needs, not what the length would."""
    toy = make_toy(blocks=40, block_size=BLOCK, token_budget=BUDGET, max_model_len=100)
    params = SamplingParams(temperature=0, max_tokens=40, retention="sinks:2+6", ignore_eos=True)
    for name in range(5):
        toy.engine.add_request(str(name), [1 + name] * 50, params)
    results = toy.run()
    assert all(len(result.outputs[0].token_ids) == 40 for result in results.values())
    assert sum(result.timings.preemptions for result in results.values()) == 0
    toy.assert_idle()


@pytest.mark.parametrize("retention", ["window:10", "sinks:3+8"])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_forks_and_preemption_under_a_retention_change_no_answer(
    retention: str, windows: tuple[int | None, ...]
) -> None:
    params = SamplingParams(n=3, temperature=1, seed=7, max_tokens=30, retention=retention, ignore_eos=True)
    prompts = {str(n): [1 + (n * 7 + i) % 90 for i in range(30 + n)] for n in range(4)}
    expected = {}
    for name, prompt in prompts.items():
        alone = make_toy(blocks=128, windows=windows)
        alone.engine.add_request(name, prompt, params)
        expected[name] = [output.token_ids for output in alone.run()[name].outputs]
    toy = make_toy(blocks=22, windows=windows)
    for name, prompt in prompts.items():
        toy.engine.add_request(name, prompt, params)
    results = toy.run()
    assert {n: [o.token_ids for o in r.outputs] for n, r in results.items()} == expected
    toy.assert_idle()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_long_text_leaves_memory_and_quality_as_they_were(smollm2_path: Path) -> None:
    """300,000 tokens at full scale. Of the last tenth a fresh stream that began 4,096 tokens before it tells
    as much as one that has read all.
    """
    llm = LLM(str(smollm2_path), kv_memory="64MiB", retention="sinks:4+1020")
    total = scaled(300_000, least=20_000)
    ids = llm.tokenizer.encode(TEXT)
    ids = (ids * -(-total // len(ids)))[:total]
    tenth, sizes, held, losses = total // 10, [], [], []
    with TextStream(llm, ids) as stream:
        while stream.position < total:
            losses.append(stream.feed(1024))
            sizes.append(resident())
            held.append(stream.held_blocks)
    settled = sizes[len(sizes) // 4 :]
    assert max(settled) <= settled[0] * 1.01
    assert max(held) <= (Retention(4, 1020).most_blocks(128, 16) or 0)
    with TextStream(llm, ids[total - tenth - 4096 :]) as fresh:
        fresh.skip(4096)
        again = fresh.feed(tenth)
    last = torch.cat(losses)[-tenth:]
    assert math.exp(last.mean()) == pytest.approx(math.exp(again.mean()), rel=0.02)
    llm.engine.cache.check_integrity()
    assert llm.engine.cache.stats().groups[0].held == 0
