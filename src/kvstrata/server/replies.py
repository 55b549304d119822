"""From results and deltas to bodies and events, for chats and for completions.

A stream's events repeat the same head; it is written once, and each event adds its choices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Protocol

from kvstrata.engine.outputs import CompletionOutput, Delta, RequestOutput
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.server.call import Batch
from kvstrata.server.logprobs import Ranked, chat_logprobs, completion_logprobs, shown_tokens
from kvstrata.server.requests import ChatRequest, CompletionRequest, StreamOptions
from kvstrata.server.shapes import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    UsageBody,
)

DONE = b"data: [DONE]\n\n"
_TEXT = "\0text\0"  # is nowhere else in an event
_ENDED_BY_US = ("abort", "error")


class Reply(Protocol):
    """How one endpoint tells its answers."""

    def body(self, results: Sequence[RequestOutput]) -> Any:
        """The whole answer."""

    def events(self, batch: Batch) -> bytes:
        """Server-sent events for what is new."""

    def last_event(self, results: Iterable[RequestOutput]) -> bytes:
        """The event after the answers' end, with the usage if it was asked for."""


def usage_body(results: Iterable[RequestOutput], *, answered: bool = True) -> UsageBody:
    """Tokens of several results together. answered: False where only the prompt was wanted."""
    usages = [result.usage for result in results]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages) if answered else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


@dataclass(frozen=True)
class Head:
    """What every body and event of a reply begins with. created: seconds since 1970."""

    reply_id: str
    created: int
    model: str


class _Events:
    """Writes events with one head."""

    def __init__(self, kind: str, head: Head, options: StreamOptions | None) -> None:
        with_usage = options is not None and bool(options.include_usage)
        start = json.dumps(
            {"id": head.reply_id, "object": kind, "created": head.created, "model": head.model}
        )
        self._start = f'data: {start[:-1]}, "choices": '
        self._end = ', "usage": null}\n\n' if with_usage else "}\n\n"
        self._with_usage = with_usage

    def event(self, choice: dict[str, Any]) -> str:
        return f"{self._start}[{json.dumps(choice)}]{self._end}"

    def around_text(self, choice: Callable[[str], dict[str, Any]]) -> tuple[str, str]:
        """What is before and after an event's text, as a JSON string: all other text but that is the same."""
        before, after = self.event(choice(_TEXT)).split(quoted(_TEXT))
        return before, after

    def last(self, usage: UsageBody) -> bytes:
        if not self._with_usage:
            return b""
        return f'{self._start}[], "usage": {json.dumps(usage)}}}\n\n'.encode()


class ChatReply:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, body: ChatRequest, head: Head, tokenizer: Tokenizer) -> None:
        self._body = body
        self._head = head
        self._tokenizer = tokenizer
        self._around: dict[int, tuple[str, str]] = {}  # of each answer that has begun: its plain events
        self._events = _Events("chat.completion.chunk", head, body.stream_options)

    def body(self, results: Sequence[RequestOutput]) -> ChatCompletion:
        """The whole answer."""
        return {
            "id": self._head.reply_id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(answer) for answer in results[0].outputs],
            "usage": usage_body(results),
        }

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, part: CompletionOutput | Delta) -> ChatLogprobs | None:
        if part.logprobs is None or not self._body.logprobs:
            return None
        tokens = _shown(part, self._body.include_stop_str_in_output)
        return chat_logprobs(tokens, part.logprobs, self._body.top_logprobs or 0, self._tokenizer)

    def events(self, batch: Batch) -> bytes:
        """Server-sent events for what is new; an answer's first one tells the role."""
        events = []
        for _, delta in batch:
            if delta.index not in self._around:
                self._around[delta.index] = self._plain(delta.index)
                events.append(self._event(delta.index, {"role": "assistant", "content": ""}))
            if _is_plain(delta):
                before, after = self._around[delta.index]
                events.append(f"{before}{quoted(delta.text)}{after}")
            elif _tells(delta):
                content = {"content": delta.text} if delta.text else {}
                events.append(self._event(delta.index, content, self._logprobs(delta), delta.finish_reason))
        return "".join(events).encode()

    def _plain(self, index: int) -> tuple[str, str]:
        return self._events.around_text(
            lambda text: {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        )

    def _event(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> str:
        return self._events.event(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def last_event(self, results: Iterable[RequestOutput]) -> bytes:
        """The event with the usage, if it was asked for."""
        return self._events.last(usage_body(results))


class CompletionReply:
    """Answers of `/v1/completions`: to prompt p, answer a has the index p * n + a.

    prompts: the texts to echo, and their tokens.
    """

    def __init__(
        self,
        body: CompletionRequest,
        head: Head,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[str, list[int]]],
    ) -> None:
        self._body = body
        self._head = head
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = body.n or 1
        self._lengths: dict[int, int] = {}  # characters of each answer so far
        self._around: dict[int, tuple[str, str]] = {}  # of each answer's plain events
        self._events = _Events("text_completion", head, body.stream_options)

    def body(self, results: Sequence[RequestOutput]) -> Completion:
        """The whole answer."""
        return {
            "id": self._head.reply_id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [
                self._choice(number, answer, result)
                for number, result in enumerate(results)
                for answer in result.outputs
            ],
            "usage": usage_body(results, answered=not self._body.echo_only),
        }

    def _choice(self, number: int, answer: CompletionOutput, result: RequestOutput) -> CompletionChoice:
        echoed = self._prompts[number][0] if self._body.echo else ""
        text = "" if self._body.echo_only else answer.text
        return {
            "index": number * self._n + answer.index,
            "text": echoed + text,
            "logprobs": self._whole_logprobs(number, answer, result, len(echoed)),
            "finish_reason": "length" if self._body.echo_only else answer.finish_reason,
        }

    def _whole_logprobs(
        self, number: int, answer: CompletionOutput, result: RequestOutput, echoed: int
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None or answer.logprobs is None:
            return None
        own = self._logprobs(answer, echoed)
        if not self._body.echo:
            return own
        front = self._prompt_logprobs(number, result.prompt_logprobs)
        return front if front is None or self._body.echo_only else _joined(front, own)

    def _prompt_logprobs(
        self, number: int, ranked: Sequence[Ranked | None] | None
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None or ranked is None:
            return None
        return completion_logprobs(self._prompts[number][1], ranked, self._body.logprobs, self._tokenizer, 0)

    def _logprobs(self, part: CompletionOutput | Delta, offset: int) -> CompletionLogprobs | None:
        if self._body.logprobs is None or part.logprobs is None:
            return None
        tokens = _shown(part, self._body.include_stop_str_in_output)
        return completion_logprobs(tokens, part.logprobs, self._body.logprobs, self._tokenizer, offset)

    def events(self, batch: Batch) -> bytes:
        """Server-sent events for what is new; with echo an answer's first one brings the prompt."""
        events = []
        for number, delta in batch:
            index = number * self._n + delta.index
            if index not in self._lengths:
                self._lengths[index] = 0
                self._around[index] = self._plain(index)
                if self._body.echo:
                    events.append(self._echo_event(number, index, delta))
            if self._body.echo_only:
                continue
            if _is_plain(delta):
                before, after = self._around[index]
                self._lengths[index] += len(delta.text)
                events.append(f"{before}{quoted(delta.text)}{after}")
            elif _tells(delta):
                logprobs = self._logprobs(delta, self._lengths[index])
                self._lengths[index] += len(delta.text)
                events.append(self._event(index, delta.text, logprobs, delta.finish_reason))
        return "".join(events).encode()

    def _plain(self, index: int) -> tuple[str, str]:
        return self._events.around_text(
            lambda text: {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        )

    def _echo_event(self, number: int, index: int, delta: Delta) -> str:
        text, _ = self._prompts[number]
        self._lengths[index] = len(text)
        logprobs = self._prompt_logprobs(number, delta.prompt_logprobs)
        return self._event(index, text, logprobs, "length" if self._body.echo_only else None)

    def _event(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, finish_reason: str | None
    ) -> str:
        return self._events.event(
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def last_event(self, results: Iterable[RequestOutput]) -> bytes:
        """The event with the usage, if it was asked for."""
        return self._events.last(usage_body(results, answered=not self._body.echo_only))


def _is_plain(delta: Delta) -> bool:
    """Whether there is nothing but text to tell, as in almost every event of a stream."""
    return bool(delta.text) and delta.finish_reason is None and delta.logprobs is None


def _tells(delta: Delta) -> bool:
    """Whether a client learns anything from it; how we end a request is told as an error."""
    if delta.finish_reason in _ENDED_BY_US:
        return bool(delta.text)
    return bool(delta.text or delta.finish_reason or delta.logprobs)


def _shown(part: CompletionOutput | Delta, include_stop: bool | None) -> Sequence[int]:
    return shown_tokens(part.token_ids, part.finish_reason, part.stop_reason, include_stop=bool(include_stop))


def _joined(front: CompletionLogprobs, back: CompletionLogprobs | None) -> CompletionLogprobs:
    if back is None:
        return front
    tops = (front["top_logprobs"], back["top_logprobs"])
    return {
        "tokens": front["tokens"] + back["tokens"],
        "token_logprobs": front["token_logprobs"] + back["token_logprobs"],
        "top_logprobs": None if tops[0] is None or tops[1] is None else tops[0] + tops[1],
        "text_offset": front["text_offset"] + back["text_offset"],
    }
