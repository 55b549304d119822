"""A request that can never fit is rejected at once with the reason, and holds up nobody."""

import pytest
from toy import make_toy

from kvstrata import SamplingParams
from kvstrata.errors import RequestError


def test_a_prompt_larger_than_the_pool_is_rejected_and_the_next_completes() -> None:
    toy = make_toy(blocks=8, block_size=16, max_model_len=512)
    with pytest.raises(RequestError, match=r"prompt has 200 tokens; the KV pool holds 128.*kv_memory"):
        toy.engine.add_request("big", [1] * 200, SamplingParams(max_tokens=5))
    toy.engine.add_request("small", [1] * 10, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(toy.run()["small"].outputs[0].token_ids) == 5
    toy.assert_idle()


def test_a_prompt_longer_than_the_model_allows_names_the_limit() -> None:
    toy = make_toy(blocks=64, block_size=16, max_model_len=100)
    with pytest.raises(RequestError, match=r"prompt has 100 tokens; .* at most 100 fit \(max_model_len\)"):
        toy.engine.add_request("big", [1] * 100, SamplingParams(max_tokens=5))


def test_an_answer_ends_where_the_pool_ends() -> None:
    toy = make_toy(blocks=8, block_size=16, max_model_len=512)
    toy.engine.add_request("x", [1] * 100, SamplingParams(max_tokens=100, ignore_eos=True))
    output = toy.run()["x"].outputs[0]
    assert len(output.token_ids) == 28
    assert output.finish_reason == "length"
    toy.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([1, 96], SamplingParams(), "token id 96; ids of this model are 0 to 95"),
        ([-1], SamplingParams(), "token id -1"),
        ([1], SamplingParams(n=17), "n is 17; at most 16 answers"),
    ],
)
def test_what_can_never_be_served_is_named(prompt: list[int], params: SamplingParams, message: str) -> None:
    toy = make_toy()
    with pytest.raises(RequestError, match=message):
        toy.engine.add_request("x", prompt, params)
    assert not toy.engine.has_unfinished
