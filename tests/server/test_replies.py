"""Events of a stream: those put together from ready parts say what the others would."""

from __future__ import annotations

import json

import pytest
from toy import toy_tokenizer

from kvstrata.engine.outputs import Delta
from kvstrata.server.problems import ApiError
from kvstrata.server.replies import ChatReply, CompletionReply, Head, Reply
from kvstrata.server.requests import ChatRequest, CompletionRequest

HEAD = Head("reply-1", 1_700_000_000, 'a "model" of text\\')
TEXTS = [
    "plain",
    'quotes " and \\ backslashes',
    "line\nbreak\ttab\x00",
    "日本語 😀 \u2028",
    "data: [DONE]\n\n",
    "$0 {} %s",
]


def replies() -> list[Reply]:
    messages = [{"role": "user", "content": "hi"}]
    return [
        ChatReply(ChatRequest(messages=messages, stream=True), HEAD, toy_tokenizer()),
        CompletionReply(CompletionRequest(prompt="hi", stream=True), HEAD, toy_tokenizer(), [("hi", [1, 2])]),
    ]


def choices(reply: Reply, *deltas: Delta) -> list[dict]:
    events = reply.events([(0, delta) for delta in deltas]).decode().split("\n\n")
    assert events.pop() == ""
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    for event in told:
        assert (event["id"], event["created"], event["model"]) == (HEAD.reply_id, HEAD.created, HEAD.model)
    return [choice for event in told for choice in event["choices"]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", [0, 1], ids=["chat", "completion"])
def test_a_plain_event_carries_its_text_as_it_is(which: int, text: str) -> None:
    reply = replies()[which]
    delta = Delta("r", index=1, text=text, token_ids=[5])
    told = choices(reply, delta)[-1]
    assert (told["delta"]["content"] if which == 0 else told["text"]) == text
    assert (told["index"], told["logprobs"], told["finish_reason"]) == (1, None, None)


@pytest.mark.parametrize("which", [0, 1], ids=["chat", "completion"])
def test_plain_and_other_events_have_the_same_fields(which: int) -> None:
    reply = replies()[which]
    plain = choices(reply, Delta("r", index=0, text="a", token_ids=[5]))[-1]
    last = choices(reply, Delta("r", index=0, text="b", token_ids=[6], finish_reason="stop"))[-1]
    assert plain.keys() == last.keys()
    assert last["finish_reason"] == "stop"


def test_a_chat_answer_tells_its_role_once() -> None:
    reply = replies()[0]
    deltas = [Delta("r", index=0, text=text, token_ids=[5]) for text in "abc"]
    told = [choice["delta"] for choice in choices(reply, *deltas)]
    assert told == [{"role": "assistant", "content": ""}, *({"content": text} for text in "abc")]


def test_an_error_repeats_little_of_what_a_client_sent():
    message = str(ApiError(400, f"stop is {'x' * 10**6!r}; it must be short"))
    assert len(message) < 1100
    assert message.startswith("stop is 'xxx")
    assert message.endswith("it must be short")
