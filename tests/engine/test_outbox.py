"""What a reader gets from an outbox: what it missed, merged, and nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.engine.outbox import Outbox
from kvstrata.engine.outputs import Delta, RequestOutput, Timings, Usage


def delta(text: str, index: int = 0, *, last: bool = False) -> Delta:
    usage, timings = Usage(1, 1, 0), Timings(0.0, 0.0, (), 0.0)
    result = RequestOutput("r", None, [1], None, [], usage, timings) if last else None
    return Delta("r", index, text, [ord(text)], finish_reason="stop" if last else None, result=result)


def put(outbox: Outbox, *deltas: Delta) -> None:
    for each in deltas:
        if outbox.put(each):
            outbox.wake()


def test_a_reader_who_keeps_up_gets_each_delta_as_it_is() -> None:
    async def read() -> None:
        outbox = Outbox("r")
        for text in "abc":
            sent = delta(text)
            put(outbox, sent)
            assert await outbox.take() == [sent]

    asyncio.run(read())


def test_what_was_missed_is_one_delta_an_answer_and_the_last_has_the_result() -> None:
    async def read() -> list[Delta]:
        outbox = Outbox("r")
        put(outbox, delta("a"), delta("x", 1), delta("b"), delta("c"), delta("y", 1, last=True))
        return await outbox.take()

    first, second = asyncio.run(read())
    assert (first.text, first.token_ids, first.result) == ("abc", [97, 98, 99], None)
    assert (second.text, second.index, second.finish_reason) == ("xy", 1, "stop")
    assert second.result is not None


def test_the_result_comes_last_even_where_its_answer_began_first() -> None:
    async def read() -> list[Delta]:
        outbox = Outbox("r")
        put(outbox, delta("a", last=False), delta("x", 1), delta("b", last=True))
        return await outbox.take()

    assert [each.result is not None for each in asyncio.run(read())] == [False, True]


def test_a_reader_who_waits_is_woken_once_for_many() -> None:
    async def read() -> list[Delta]:
        outbox = Outbox("r")
        waiting = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        assert [outbox.put(delta(text)) for text in "ab"] == [True, False]
        outbox.wake()
        return await waiting

    [merged] = asyncio.run(read())
    assert merged.text == "ab"


def test_an_error_ends_the_wait() -> None:
    async def read() -> None:
        outbox = Outbox("r")
        put(outbox, delta("a"))
        assert outbox.fail(ValueError("broken")) is False  # it is woken already
        await outbox.take()

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
