"""Several answers from one prompt: each equals a run of its own, whatever becomes of its siblings."""

import pytest
from toy import make_toy

from kvstrata import SamplingParams
from kvstrata.engine.outputs import CompletionOutput
from kvstrata.engine.request import Status

BLOCK = 4
PROMPT = list(range(1, BLOCK + 4))  # a full block and three tokens: the partial tail is shared


def params(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True, seed=7, logprobs=3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [64, 14])
def test_each_answer_equals_a_solo_run_over_its_own_tokens(blocks: int) -> None:
    toy = make_toy(blocks=blocks, block_size=BLOCK)
    toy.engine.add_request("x", PROMPT, params(n=4))
    result = toy.run()["x"]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 4
    for output in result.outputs:
        assert_solo(PROMPT, output)
    toy.assert_idle()


def test_two_answers_dropped_midway_leave_the_others_untouched() -> None:
    whole = make_toy(block_size=BLOCK)
    whole.engine.add_request("x", PROMPT, params(n=4))
    expected = [output.token_ids for output in whole.run()["x"].outputs]

    toy = make_toy(block_size=BLOCK)
    toy.engine.add_request("x", PROMPT, params(n=4))
    for _ in range(4):
        toy.step()
    request = toy.engine.scheduler.running[0].request
    for index in (1, 2):
        toy.engine.scheduler.finish(request.sequences[index])
        request.sequences[index].finish_reason = "abort"
        toy.cache.check_integrity()
    result = toy.run()["x"]

    for index in (0, 3):
        assert result.outputs[index].token_ids == expected[index]
    assert all(s.status is Status.FINISHED for s in request.sequences)
    toy.assert_idle()


def assert_solo(prompt: list[int], output: CompletionOutput) -> None:
    """At every token, a fresh engine over the same tokens gives the same distribution, to the bit."""
    assert output.logprobs is not None
    for cut, (token, listed) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        solo = make_toy(prefix_caching=False)
        probe = [*prompt, *output.token_ids[:cut], token]
        solo.engine.add_request("s", probe, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3))
        known = solo.run()["s"].prompt_logprobs
        assert known is not None
        assert known[-1] == listed
