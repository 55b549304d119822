"""Prompt log-probabilities on a cached prompt: right at every position, as if cold; they take no hits."""

import pytest
from toy import make_toy

from kvstrata import SamplingParams


@pytest.mark.parametrize("token_budget", [3, 8, 64])
def test_every_position_is_as_if_cold(token_budget: int) -> None:
    prompt = list(range(1, 15))
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    cold_toy = make_toy(token_budget=64)
    cold_toy.engine.add_request("cold", prompt, params)
    cold = cold_toy.run()["cold"]

    toy = make_toy(token_budget=token_budget)
    toy.engine.add_request("first", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    toy.run()
    toy.engine.add_request("again", prompt, params)
    again = toy.run()["again"]

    assert again.usage.cached_tokens == 0
    assert again.prompt_logprobs is not None
    assert len(again.prompt_logprobs) == len(prompt)
    assert again.prompt_logprobs[0] is None
    for token, listed in zip(prompt[1:], again.prompt_logprobs[1:], strict=True):
        assert listed is not None
        assert token in listed
        assert sorted(p.rank for p in listed.values())[:2] == [1, 2]
    assert again.prompt_logprobs == cold.prompt_logprobs
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids
    toy.assert_idle()


def test_a_preempted_prompt_is_noted_once() -> None:
    """Preemption in the middle of the prompt computes it again; no position may be there twice."""
    prompt = list(range(1, 25))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    toy = make_toy(token_budget=8)
    toy.engine.add_request("x", prompt, params)
    toy.step()
    sequence = toy.engine.scheduler.running[0]
    toy.engine.scheduler.preempt(sequence)
    result = toy.run()["x"]

    solo = make_toy(token_budget=64)
    solo.engine.add_request("x", prompt, params)
    assert result.prompt_logprobs == solo.run()["x"].prompt_logprobs
    assert result.timings.preemptions == 1
