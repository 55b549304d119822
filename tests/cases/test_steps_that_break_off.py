"""A step that breaks off (Ctrl-C, no memory, a defect): the others get the answers they would have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from speculating import draft_model, layers
from toy import MakeSpeculator, Toy, make_toy

from kvstrata import SamplingParams
from kvstrata.engine.request import Sequence
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

    toy.engine._settler._sample = broken  # type: ignore[method-assign]


def break_in_a_run(toy: Toy) -> None:
    """Between an accepted token's K and V and the draw after it."""

    def broken(sequence: Sequence) -> None:
        accepted(sequence)
        raise MemoryError

    accepted = toy.engine.scheduler.accepted
    toy.engine.scheduler.accepted = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "speculate"),
    [
        (break_in_forward, None),
        (break_in_sampling, None),
        (break_in_forward, draft_model(2)),
        (break_in_sampling, layers(2)),
        (break_in_a_run, layers(2)),
        (break_in_a_run, draft_model(2)),
    ],
)
@pytest.mark.parametrize("step", range(7))
def test_a_step_that_breaks_off_costs_no_answer(
    break_it: Callable[[Toy], None], speculate: MakeSpeculator | None, step: int
) -> None:
    expected = make_toy(blocks=200)
    submit(expected)
    whole = expected.run()
    toy = make_toy(blocks=200, speculate=speculate)
    submit(toy)
    results = {d.request_id: d.result for _ in range(step) for d in toy.step() if d.result}
    break_it(toy)
    if speculate is None or (break_it is not break_in_a_run and toy.engine.has_unfinished):
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            toy.step()
    else:  # speculating, answers may have ended, and no run may be accepted in this step
        with contextlib.suppress(MemoryError):
            results |= {d.request_id: d.result for d in toy.step() if d.result}
    for owner, mended in (
        (toy.model, "forward"),
        (toy.engine._settler, "_sample"),
        (toy.engine.scheduler, "accepted"),
    ):
        vars(owner).pop(mended, None)
    results |= toy.run()
    toy.assert_idle()
    for name in PROMPTS:
        assert [o.token_ids for o in results[name].outputs] == [o.token_ids for o in whole[name].outputs]
        assert results[name].prompt_logprobs == whole[name].prompt_logprobs
