"""The engine's thread seen from an event loop: delivery, aborts, refusals, failures, and how all end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from toy import Toy, make_toy

from kvstrata.config import SamplingParams
from kvstrata.engine.outbox import Outbox
from kvstrata.engine.outputs import Delta, RequestOutput
from kvstrata.engine.serving import Serving, Submission
from kvstrata.errors import OverloadedError, RequestError, StoppedError

LIMIT = 60.0  # seconds, generous: it is there to end a hang
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def with_serving(
    scenario: Callable[[Serving, Toy], Coroutine[Any, Any, None]], *, max_open: int = 16, **toy: Any
) -> Toy:
    """Run a scenario against a served toy; its blocks are all back afterwards."""
    engine = make_toy(**toy)
    serving = Serving(engine.engine, max_open=max_open)
    serving.start()

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT):
            await scenario(serving, engine)

    try:
        asyncio.run(bounded())
    finally:
        assert serving.stop(LIMIT)
    return engine


def submit(
    serving: Serving,
    name: str,
    params: SamplingParams = SHORT,
    *,
    prompt: str = "abcdefgh",
    whole: bool = False,
) -> Outbox:
    outbox = Outbox(name, whole=whole)
    serving.submit(Submission(name, [ord(c) - 32 for c in prompt], params), outbox)
    return outbox


async def read(outbox: Outbox) -> tuple[list[Delta], RequestOutput]:
    deltas: list[Delta] = []
    while True:
        deltas += await outbox.take()
        if deltas and deltas[-1].result is not None:
            return deltas, deltas[-1].result


def test_deltas_add_up_to_the_result():
    async def scenario(serving: Serving, toy: Toy) -> None:
        readers = [read(submit(serving, f"r{n}", prompt="abc" * n)) for n in range(1, 6)]
        for deltas, result in await asyncio.gather(*readers):
            assert "".join(delta.text for delta in deltas) == result.outputs[0].text
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == result.outputs[0].token_ids

    with_serving(scenario).assert_idle()


def test_what_a_slow_reader_has_not_taken_is_merged_to_one_delta_an_answer():
    async def scenario(serving: Serving, toy: Toy) -> None:
        params = SamplingParams(n=2, temperature=1, seed=1, max_tokens=50, ignore_eos=True, logprobs=1)
        slow = submit(serving, "slow", params)
        while serving.open_requests:
            await asyncio.sleep(0.01)
        deltas = await slow.take()
        assert [delta.index for delta in deltas] == [0, 1]
        result = deltas[-1].result
        assert result is not None
        for delta, answer in zip(deltas, result.outputs, strict=True):
            assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == (
                answer.text,
                answer.token_ids,
                answer.logprobs,
                "length",
            )

    with_serving(scenario).assert_idle()


def test_a_whole_reader_is_woken_once():
    async def scenario(serving: Serving, toy: Toy) -> None:
        [delta] = await submit(serving, "whole", whole=True).take()
        assert delta.result is not None
        assert len(delta.result.outputs[0].token_ids) == 8

    with_serving(scenario)


def test_an_aborted_request_ends_and_its_blocks_come_back_while_others_go_on():
    async def scenario(serving: Serving, toy: Toy) -> None:
        left, stays = submit(serving, "left", LONG), submit(serving, "stays", LONG, prompt="zyx")
        await left.take()
        serving.abort("left")
        _, result = await read(left)
        assert result.outputs[0].finish_reason == "abort"
        _, result = await read(stays)
        assert len(result.outputs[0].token_ids) == 200

    with_serving(scenario, blocks=256).assert_idle()


def test_a_second_request_of_one_id_is_refused_and_the_first_is_served():
    async def scenario(serving: Serving, toy: Toy) -> None:
        first, second = submit(serving, "same", LONG), submit(serving, "same")
        with pytest.raises(RequestError, match="same"):
            await read(second)
        _, result = await read(first)
        assert len(result.outputs[0].token_ids) == 200

    with_serving(scenario, blocks=256)


def test_more_requests_than_may_be_open_are_refused_until_some_end():
    async def scenario(serving: Serving, toy: Toy) -> None:
        first, second = submit(serving, "1", LONG), submit(serving, "2", LONG)
        with pytest.raises(OverloadedError):
            submit(serving, "3")
        await asyncio.gather(read(first), read(second))
        await read(submit(serving, "3"))

    with_serving(scenario, max_open=2, blocks=256)


def test_a_refused_request_makes_room_again():
    async def scenario(serving: Serving, toy: Toy) -> None:
        for _ in range(5):
            with pytest.raises(RequestError):
                await read(submit(serving, "empty", prompt=""))

    with_serving(scenario, max_open=1)


def test_a_failing_step_ends_every_request_and_all_that_come_later():
    async def scenario(serving: Serving, toy: Toy) -> None:
        both = [submit(serving, "1", LONG), submit(serving, "2", LONG)]
        await both[0].take()

        def forward(batch: object) -> None:
            raise MemoryError("no more")

        toy.model.forward = forward  # type: ignore[method-assign, assignment]
        for outbox in both:
            with pytest.raises(StoppedError, match="no more"):
                await read(outbox)
        assert not serving.healthy
        assert serving.open_requests == 0
        with pytest.raises(StoppedError, match="no more"):
            submit(serving, "3")
        with pytest.raises(StoppedError):
            serving.call(toy.assert_idle)

    with_serving(scenario, blocks=256)


def test_a_defect_on_arrival_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch):
    async def scenario(serving: Serving, toy: Toy) -> None:
        monkeypatch.setattr(toy.engine, "add_request", lambda *a, **k: 1 / 0)
        outboxes = [submit(serving, f"{n}") for n in range(2)]
        for outbox in outboxes:
            with pytest.raises((StoppedError, ZeroDivisionError)):
                await read(outbox)
        assert not serving.healthy

    with_serving(scenario)


def test_stopping_ends_what_is_open():
    async def scenario(serving: Serving, toy: Toy) -> None:
        outbox = submit(serving, "1", LONG)
        await outbox.take()
        await asyncio.to_thread(serving.stop, LIMIT)
        with pytest.raises(StoppedError, match="shutting down"):
            await read(outbox)
        with pytest.raises(StoppedError, match="shutting down"):
            submit(serving, "2")

    with_serving(scenario, blocks=256)


def test_calls_run_on_the_engines_thread_and_pass_their_errors_on():
    async def scenario(serving: Serving, toy: Toy) -> None:
        thread = await asyncio.wrap_future(serving.call(threading.current_thread))
        assert thread.name == "kvstrata-engine"
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(serving.call(lambda: 1 / 0))
        assert serving.healthy
        await read(submit(serving, "1"))

    with_serving(scenario)


def test_an_idle_engine_does_not_step(monkeypatch: pytest.MonkeyPatch):
    async def scenario(serving: Serving, toy: Toy) -> None:
        await read(submit(serving, "1"))
        steps: list[int] = []
        step = toy.engine.step
        monkeypatch.setattr(toy.engine, "step", lambda: (steps.append(1), step())[1])
        await asyncio.sleep(0.05)
        assert await asyncio.wrap_future(serving.call(lambda: len(steps))) == 0

    with_serving(scenario)
