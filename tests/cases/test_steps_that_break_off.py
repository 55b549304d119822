"""A step that breaks off (Ctrl-C, no memory, a defect): the others get the answers they would have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toy import Toy, make_toy

from kvstrata import SamplingParams
from kvstrata.models.batch import ForwardBatch

PROMPTS = {"a": list(range(1, 20)), "b": list(range(40, 45)), "c": list(range(1, 30))}


def submit(toy: Toy) -> None:
    for name, prompt in PROMPTS.items():
        params = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
        toy.engine.add_request(name, prompt, params)


def break_in_forward(toy: Toy) -> None:
    forward = toy.model.forward

    def broken(batch: ForwardBatch) -> None:
        forward(batch)
        raise KeyboardInterrupt

    toy.model.forward = broken  # type: ignore[assignment,method-assign]


def break_in_sampling(toy: Toy) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    toy.engine._sample = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("break_it", [break_in_forward, break_in_sampling])
@pytest.mark.parametrize("step", range(7))
def test_a_step_that_breaks_off_costs_no_answer(break_it: Callable[[Toy], None], step: int) -> None:
    expected = make_toy(blocks=200)
    submit(expected)
    whole = expected.run()
    toy = make_toy(blocks=200)
    submit(toy)
    results = {d.request_id: d.result for _ in range(step) for d in toy.step() if d.result}
    break_it(toy)
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        toy.step()
    for mended in ("forward", "_sample"):
        vars(toy.model).pop(mended, None)
        vars(toy.engine).pop(mended, None)
    results |= toy.run()
    toy.assert_idle()
    for name in PROMPTS:
        assert [o.token_ids for o in results[name].outputs] == [o.token_ids for o in whole[name].outputs]
        assert results[name].prompt_logprobs == whole[name].prompt_logprobs
