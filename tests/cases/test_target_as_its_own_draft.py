"""Runs of accepted tokens that go past an end: an end token, max_tokens, a stop text in the middle of one."""

from __future__ import annotations

import pytest
from speculating import draft_model, layers
from toy import MakeSpeculator, Toy, make_toy

from kvstrata import SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.engine.outputs import Delta, RequestOutput

PROMPT = [5, 6, 7, 8, 9]
RUN = 6
ITSELF = {"layers": layers(RUN), "draft model": draft_model(RUN)}


@pytest.fixture(params=ITSELF.values(), ids=ITSELF.keys())
def itself(request: pytest.FixtureRequest) -> MakeSpeculator:
    speculate: MakeSpeculator = request.param
    return speculate


def answer(toy: Toy, params: SamplingParams) -> tuple[RequestOutput, list[Delta]]:
    toy.engine.add_request("x", PROMPT, params)
    deltas: list[Delta] = []
    while toy.engine.has_unfinished:
        deltas += toy.step()
    toy.assert_idle()
    result = deltas[-1].result
    assert result is not None
    return result, deltas


def greedy_tokens(count: int) -> list[int]:
    """The first answer tokens without speculation, all different: each can be named as an end."""
    result, _ = answer(make_toy(), SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    tokens = result.outputs[0].token_ids
    assert len(set(tokens)) == count
    return tokens


def assert_ends(toy: Toy, params: SamplingParams, tokens: list[int], text: str, reason: str) -> None:
    """As without speculation, in fewer steps, with nothing after the end."""
    result, deltas = answer(toy, params)
    plain, _ = answer(make_toy(), params)
    [output] = result.outputs
    assert output == plain.outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == (tokens, text, reason)
    assert [t for d in deltas for t in d.token_ids] == tokens
    assert "".join(d.text for d in deltas) == text
    assert [d.finish_reason for d in deltas if d.finish_reason is not None] == [reason]
    assert result.timings.speculation.drafts > 0
    assert toy.model.steps < len(tokens) + 1
    # K and V of all tokens but the last were computed, found again, and no others.
    chain = toy.cache.chain([*PROMPT, *tokens], Extras())
    assert toy.cache.match(chain, len(chain)) == (len(chain) - 1) // 4 * 4


def spelt(tokens: list[int]) -> str:
    return "".join(chr(32 + token) for token in tokens)


def test_the_third_token_is_an_end_token(itself: MakeSpeculator) -> None:
    tokens = greedy_tokens(RUN)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[tokens[2]], ignore_eos=True)
    assert_ends(make_toy(speculate=itself), params, tokens[:3], spelt(tokens[:2]), "stop")


def test_a_run_of_six_with_five_tokens_to_go(itself: MakeSpeculator) -> None:
    tokens = greedy_tokens(5)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, skip_special_tokens=False)
    assert_ends(make_toy(speculate=itself), params, tokens, spelt(tokens), "length")


def test_a_stop_text_inside_a_run(itself: MakeSpeculator) -> None:
    tokens = greedy_tokens(RUN)
    params = SamplingParams(temperature=0, max_tokens=20, stop=spelt(tokens[2:4]), ignore_eos=True)
    assert_ends(make_toy(speculate=itself), params, tokens[:4], spelt(tokens[:2]), "stop")


def test_every_token_is_accepted(itself: MakeSpeculator) -> None:
    toy = make_toy(speculate=itself)
    result, _ = answer(toy, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    counts = result.timings.speculation
    assert counts.acceptance == 1.0
    assert counts.draft_tokens == 39 - counts.drafts
    assert toy.model.steps == 1 + counts.drafts
