"""How answers end, what is delivered, and what a request's figures tell."""

from __future__ import annotations

import pytest
from toy import EOS, make_toy

from kvstrata import SamplingParams
from kvstrata.errors import RequestError

PROMPT = [1, 2, 3, 4, 5]


def greedy_tokens(count: int) -> list[int]:
    toy = make_toy()
    toy.engine.add_request("x", PROMPT, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return toy.run()["x"].outputs[0].token_ids


def test_deltas_join_to_the_result() -> None:
    toy = make_toy()
    toy.engine.add_request(
        "x", PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1, n=2)
    )
    texts, ids, result = {0: "", 1: ""}, {0: [], 1: []}, None  # type: ignore[var-annotated]
    while toy.engine.has_unfinished:
        for delta in toy.step():
            texts[delta.index] += delta.text
            ids[delta.index] += delta.token_ids
            result = delta.result or result
    assert result is not None
    for output in result.outputs:
        assert texts[output.index] == output.text
        assert ids[output.index] == output.token_ids
        assert output.logprobs is not None
        chosen = [
            listed[token].logprob for token, listed in zip(output.token_ids, output.logprobs, strict=True)
        ]
        assert output.cumulative_logprob == pytest.approx(sum(chosen))


def test_an_end_token_ends_and_is_not_text() -> None:
    tokens = greedy_tokens(8)
    toy = make_toy()
    stop = tokens[3]
    first = tokens.index(stop)
    toy.engine.add_request(
        "x", PROMPT, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop], ignore_eos=True)
    )
    output = toy.run()["x"].outputs[0]
    assert output.token_ids == tokens[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == "".join(chr(32 + t) for t in tokens[:first] if t != EOS)


def test_a_stop_text_is_cut_off_unless_wanted() -> None:
    tokens = greedy_tokens(8)
    text = "".join(chr(32 + t) for t in tokens)
    stop = text[3:5]
    at = text.index(stop)
    for include in (False, True):
        toy = make_toy()
        toy.engine.add_request(
            "x",
            PROMPT,
            SamplingParams(
                temperature=0,
                max_tokens=8,
                stop=stop,
                ignore_eos=True,
                include_stop_str_in_output=include,
                skip_special_tokens=False,
            ),
        )
        output = toy.run()["x"].outputs[0]
        assert output.text == (text[: at + len(stop)] if include else text[:at])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        toy.assert_idle()


def test_min_tokens_keeps_going() -> None:
    tokens = greedy_tokens(8)
    toy = make_toy()
    params = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=[tokens[0]], ignore_eos=True
    )
    toy.engine.add_request("x", PROMPT, params)
    output = toy.run()["x"].outputs[0]
    assert len(output.token_ids) >= 5
    assert tokens[0] not in output.token_ids[:-1]


def test_without_max_tokens_the_answer_ends_at_the_models_limit() -> None:
    toy = make_toy(max_model_len=40)
    toy.engine.add_request("x", PROMPT, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    output = toy.run()["x"].outputs[0]
    assert len(output.token_ids) == 35
    assert output.finish_reason == "length"


def test_output_that_is_not_finite_fails_its_request_alone_and_publishes_nothing() -> None:
    toy = make_toy(token_budget=8)
    toy.model.fail_on = 77
    bad = [*range(1, 9), *range(10, 17), 77]
    toy.engine.add_request("bad", bad, SamplingParams(max_tokens=4))
    toy.engine.add_request("good", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    results = toy.run()
    assert results["bad"].error is not None
    assert "not finite" in results["bad"].error
    assert results["bad"].outputs[0].finish_reason == "error"
    assert results["good"].error is None
    assert len(results["good"].outputs[0].token_ids) == 4
    from kvstrata.cache.keys import Extras

    chain = toy.cache.chain([*bad, 1], Extras())
    assert toy.cache.match(chain, len(bad)) <= 12  # the chunks before it were finite; its own is not there
    toy.assert_idle()


def test_timings_and_usage() -> None:
    toy = make_toy()
    toy.clock.now = 10.0
    toy.engine.add_request(
        "x", PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), arrival=8.0
    )
    results = {}
    while toy.engine.has_unfinished:
        results.update({d.request_id: d.result for d in toy.step() if d.result})
        toy.clock.now += 1.0
    timings, usage = results["x"].timings, results["x"].usage
    assert (timings.queue, timings.ttft, timings.inter_token, timings.total) == (2.0, 2.0, (1.0, 1.0), 4.0)
    assert timings.decode_tok_s == 1.0
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 3, 8)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    toy = make_toy()
    toy.engine.add_request("x", PROMPT, SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="request_id is 'x', which is being served"):
        toy.engine.add_request("x", PROMPT, SamplingParams())
    toy.run()
    toy.engine.add_request("x", PROMPT, SamplingParams(max_tokens=2))
    toy.run()


def test_an_aborted_request_delivers_what_it_has() -> None:
    toy = make_toy()
    toy.engine.add_request("x", PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, n=2))
    for _ in range(4):
        toy.step()
    toy.engine.abort("x")
    [last] = [d.result for d in toy.step() if d.result is not None]
    assert [o.finish_reason for o in last.outputs] == ["abort", "abort"]
    assert all(len(o.token_ids) == 4 for o in last.outputs)
    toy.assert_idle()


def test_reset_forgets_and_running_requests_go_on() -> None:
    toy = make_toy()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    toy.engine.add_request("x", list(range(1, 20)), params)
    for _ in range(3):
        toy.step()
    toy.engine.reset_cache()
    toy.cache.check_integrity()
    toy.engine.add_request("y", list(range(1, 20)), params)
    results = toy.run()
    assert results["y"].usage.cached_tokens == 0
    assert results["x"].outputs[0].token_ids == results["y"].outputs[0].token_ids
    toy.assert_idle()
