"""Penalties depend on each token before, those accepted in the same run too."""

from __future__ import annotations

import pytest
from speculating import WAYS
from toy import MakeSpeculator, make_toy

from kvstrata import SamplingParams
from kvstrata.engine.outputs import RequestOutput

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]
PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "all, and no early end": {
        "repetition_penalty": 0.8,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "min_tokens": 9,
        "stop_token_ids": list(range(0, 96, 2)),
    },
    "favoured, so that they repeat": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
}


def ask(params: SamplingParams, speculate: MakeSpeculator | None) -> RequestOutput:
    toy = make_toy(blocks=128, speculate=speculate)
    toy.engine.add_request("x", PROMPT, params)
    result = toy.run()["x"]
    toy.assert_idle()
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_and_log_probabilities_are_those_without(way: str, penalty: str, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=30,
        min_p=0.01,
        seed=4,
        max_tokens=40,
        logprobs=3,
        n=2,
        **PENALTIES[penalty],  # type: ignore[arg-type]
    )
    speculated, plain = ask(params, WAYS[way]), ask(params, None)
    assert speculated.outputs == plain.outputs
    if way != "ngram":
        assert speculated.timings.speculation.accepted_tokens > 0


def test_repeats_that_penalties_favour_are_proposed_and_accepted() -> None:
    """The same token again and again: n-grams propose it, and each draw counts those accepted before."""
    params = SamplingParams(temperature=0, frequency_penalty=-2.0, max_tokens=40, logprobs=1, ignore_eos=True)
    speculated = ask(params, WAYS["ngram"])
    assert speculated.outputs == ask(params, None).outputs
    assert speculated.timings.speculation.accepted_tokens > 10
