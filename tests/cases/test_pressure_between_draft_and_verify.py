"""Preemption, aborts, failures and full pools while tokens are proposed: nothing leaks or changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scale import scaled
from speculating import WAYS, draft_model, layers
from toy import MakeSpeculator, Toy, make_toy

from kvstrata import RequestOptions, SamplingParams
from kvstrata.engine.outputs import RequestOutput

WINDOWS = [(None,), (None, 6), (5,)]


def prompt_of(number: int) -> list[int]:
    draw = random.Random(number)
    piece = [draw.randrange(1, 90) for _ in range(draw.randrange(3, 9))]
    return (piece * 5)[: draw.randrange(5, 30)]


def params_of(number: int) -> SamplingParams:
    draw = random.Random(1000 + number)
    return SamplingParams(
        temperature=draw.choice([0.0, 0.8]),
        seed=number,
        max_tokens=draw.randrange(1, 25),
        ignore_eos=True,
        logprobs=draw.choice([None, 2]),
        n=draw.choice([1, 1, 3]),
    )


def add(toy: Toy, number: int) -> None:
    toy.engine.add_request(
        str(number), prompt_of(number), params_of(number), options=RequestOptions(priority=number % 3)
    )


def alone(number: int, windows: tuple[int | None, ...]) -> RequestOutput:
    toy = make_toy(blocks=256, windows=windows)
    add(toy, number)
    return toy.run()[str(number)]


def assert_published_blocks_hold_their_tokens(toy: Toy) -> None:
    """A published block has the tokens that its key names, and none that was proposed in vain."""
    for cache in toy.caches:
        for group in cache.groups:
            for block, node in enumerate(group.nodes):
                if node is not None:
                    content = np.frombuffer(cache.content_of(node.key)[4 : 4 + 16], dtype=np.uint32)  # type: ignore[index]
                    assert group.pool.kv[block, 0, 0, 0, :, 0].tolist() == content.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_many_requests_in_a_small_pool_with_aborts(way: str, windows: tuple[int | None, ...]) -> None:
    """The pool holds two or three of the requests; every third is aborted somewhere on its way."""
    count = scaled(120, least=40)
    draw = random.Random(7)
    toy = make_toy(
        blocks=22, windows=windows, token_budget=24, max_model_len=60, max_num_seqs=6, speculate=WAYS[way]
    )
    results: dict[str, RequestOutput] = {}
    aborts: dict[str, int] = {}
    for number in range(count):
        add(toy, number)
        if number % 3 == 0:
            aborts[str(number)] = draw.randrange(1, 12)
        for _ in range(draw.randrange(0, 4)):
            results |= toy.tick(aborts)
            assert_published_blocks_hold_their_tokens(toy)
    while toy.engine.has_unfinished:
        results |= toy.tick(aborts)
    toy.assert_idle()
    assert toy.engine.scheduler.preemptions > 0 or None not in windows
    assert toy.engine.telemetry.speculation.draft_tokens > 0
    for number in range(count):
        got, expected = results[str(number)], alone(number, windows)
        for own, whole in zip(got.outputs, expected.outputs, strict=False):
            if own.finish_reason == "abort":
                assert whole.token_ids[: len(own.token_ids)] == own.token_ids
            else:
                assert own == whole


@pytest.mark.parametrize("speculate", [layers(), draft_model()], ids=["layers", "draft model"])
def test_a_step_that_breaks_off_after_the_draft_loses_nothing(speculate: MakeSpeculator) -> None:
    toy = make_toy(speculate=speculate)
    for number in range(4):
        add(toy, number)
    for _ in range(3):
        toy.step()
    forward = toy.model.forward
    for error in (KeyboardInterrupt, MemoryError):

        def broken(*_: object, error: type[BaseException] = error) -> None:
            raise error

        toy.model.forward = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(error):
            toy.engine.step()
        toy.model.forward = forward  # type: ignore[method-assign]
        for cache in toy.caches:
            cache.check_integrity()
        toy.step()
    results = toy.run()
    for number, result in ((int(name), result) for name, result in results.items()):
        assert result.outputs == alone(number, (None,)).outputs
    toy.assert_idle()


def test_no_room_for_a_guess_is_no_reason_to_preempt() -> None:
    """Two sequences fill the pool to the last block: they go on without proposals."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    toy = make_toy(blocks=10, block_size=4, max_model_len=20, speculate=layers(16))
    for name in ("a", "b"):
        toy.engine.add_request(name, [ord(name) - 32 + i for i in range(8)], params)
    results = toy.run()
    assert toy.engine.scheduler.preemptions == 0
    assert toy.engine.telemetry.speculation.draft_tokens > 0
    assert [len(result.outputs[0].token_ids) for result in results.values()] == [12, 12]


def test_not_finite_after_a_wrong_guess_fails_nobody() -> None:
    """The row after a token that is not accepted is nobody's: what it holds does not count."""
    tokens = make_toy()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    tokens.engine.add_request("x", [1, 2, 3], params)
    expected = tokens.run()["x"].outputs
    toy = make_toy(speculate=layers(wrong_one_in=2))
    drafter = toy.engine.speculator
    assert drafter is not None
    toy.model.fail_on = next(t for t in range(1, 96) if t not in expected[0].token_ids and t > 3)
    real = drafter.propose

    def poisoned(works):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return [replace(w, draft=(*w.draft[:1], toy.model.fail_on)) if w.draft else w for w in real(works)]

    drafter.propose = poisoned  # type: ignore[method-assign]
    toy.engine.add_request("x", [1, 2, 3], params)
    result = toy.run()["x"]
    assert result.error is None
    assert result.outputs == expected
