"""A draft model's own cache: it shares prefixes, keeps salts apart, holds only what was accepted."""

from __future__ import annotations

import itertools

import pytest
from speculating import draft_model
from toy import Toy, ToyModel, make_toy

from kvstrata import RequestOptions, SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.engine.speculation.draft_model import ModelDrafter

PROMPT = [1 + (7 * n) % 90 for n in range(41)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def drafter_of(toy: Toy) -> ModelDrafter:
    assert toy.engine.speculator is not None
    drafter = toy.engine.speculator.drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter


def tokens_drafted(toy: Toy, name: str, salt: str = "") -> int:
    """Tokens that the draft model computes for a request."""
    model = drafter_of(toy)._runner._model
    assert isinstance(model, ToyModel)
    before = model.tokens_computed
    toy.engine.add_request(name, PROMPT, GREEDY, options=RequestOptions(cache_salt=salt))
    toy.run()
    return model.tokens_computed - before


def test_a_prompt_that_it_knows_is_not_computed_again_but_under_another_salt() -> None:
    toy = make_toy(speculate=draft_model())
    first = tokens_drafted(toy, "a")
    assert first >= len(PROMPT)
    assert tokens_drafted(toy, "b") <= first - 40
    assert tokens_drafted(toy, "c", salt="other") == first
    toy.assert_idle()


def test_answers_are_published_too_as_far_as_they_were_accepted() -> None:
    toy = make_toy(speculate=draft_model(wrong_one_in=3))
    toy.engine.add_request("x", PROMPT, GREEDY)
    result = toy.run()["x"]
    chain = drafter_of(toy).cache.chain([*PROMPT, *result.outputs[0].token_ids], Extras())
    assert 40 < drafter_of(toy).cache.match(chain, len(chain)) <= len(chain)


def test_reset_forgets_the_drafts_cache_too() -> None:
    toy = make_toy(speculate=draft_model())
    first = tokens_drafted(toy, "a")
    toy.engine.reset_cache()
    assert tokens_drafted(toy, "b") == first


def test_a_long_prompt_is_caught_up_with_in_chunks_of_the_budget() -> None:
    toy = make_toy(token_budget=20, blocks=128, speculate=draft_model(blocks=128))
    model = drafter_of(toy)._runner._model
    assert isinstance(model, ToyModel)
    toy.engine.add_request("x", [1 + (5 * n) % 90 for n in range(100)], GREEDY)
    computed = [0]
    while toy.engine.has_unfinished:
        toy.step()
        computed.append(model.tokens_computed)
    assert max(b - a for a, b in itertools.pairwise(computed)) <= 20 + 5
    assert toy.engine.telemetry.speculation.accepted_tokens > 0


@pytest.mark.parametrize("blocks", [3, 12, 16])
def test_a_pool_too_small_for_all_costs_proposals_and_nothing_else(blocks: int) -> None:
    toy = make_toy(blocks=128, speculate=draft_model(blocks=blocks))
    plain = make_toy(blocks=128)
    for each in (toy, plain):
        for number in range(4):
            each.engine.add_request(str(number), [number + 1, *PROMPT[:30]], GREEDY)
    expected = plain.run()
    assert {name: r.outputs for name, r in toy.run().items()} == {n: r.outputs for n, r in expected.items()}
    toy.assert_idle()


def test_nothing_is_proposed_past_the_drafts_own_length() -> None:
    toy = make_toy(speculate=draft_model(max_len=len(PROMPT) + 6))
    toy.engine.add_request("x", PROMPT, GREEDY)
    result = toy.run()["x"]
    assert 0 < result.timings.speculation.accepted_tokens < 6
    assert len(result.outputs[0].token_ids) == 12


def test_ids_that_the_draft_does_not_know_end_proposals_and_not_the_answer() -> None:
    toy = make_toy(speculate=draft_model())
    drafter = drafter_of(toy)
    toy.engine.add_request("x", PROMPT, GREEDY)
    toy.step()
    drafter._vocab_size = 2  # all of the answer is beyond
    result = toy.run()["x"]
    assert result.timings.speculation.draft_tokens == 0
    assert len(result.outputs[0].token_ids) == 12
