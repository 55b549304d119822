"""The front door: a model, and what it says to prompts."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence, Set
from types import TracebackType
from typing import Any

from kvstrata.config import EngineConfig, RequestOptions, SamplingParams
from kvstrata.engine.build import build
from kvstrata.engine.engine import StepReport
from kvstrata.engine.outputs import Delta, RequestOutput
from kvstrata.engine.prompts import (
    Messages,
    Prompt,
    check_callback,
    check_options,
    conversations,
    listed_prompts,
    params_for,
    text_and_ids,
)
from kvstrata.errors import ConfigError, RequestError


class LLM:
    """A model with its cache, for programs that want answers and no server.

    settings: the fields of `EngineConfig`, by name; or a `config`. Raises ConfigError and ModelError.

        llm = LLM()
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

    One thread at a time may use it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        **settings: Any,
    ) -> None:
        if config is None:
            config = EngineConfig.from_mapping({"model": model, **settings})
        elif settings or model is not None:
            raise ConfigError("config is given beside settings; give LLM one of them")
        if not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; give an EngineConfig, or settings by name"
            )
        check_callback("on_step", on_step)
        check_callback("progress", progress)
        self.config = config
        loaded = build(config, progress=progress, on_step=on_step)
        self.loaded = loaded
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        if config.tiers:  # at the latest when the process ends, what was computed goes there
            weakref.finalize(self, loaded.engine.close)
        self._numbers = itertools.count()
        self._inboxes: dict[str, deque[Delta]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once, and return the results in their order.

        sampling_params: one for all, or one for each (None: `SamplingParams()`). options: cache salt,
        priority and so on, for all. progress: called with requests finished so far and their total.
        Raises RequestError where a prompt can never be served; none is then.
        """
        arrival = time.perf_counter()
        texts = [text_and_ids(prompt, self.tokenizer.encode) for prompt in listed_prompts(prompts)]
        return self._run(texts, sampling_params, arrival, progress, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of `{"role": ..., "content": ...}`.

        The other arguments, what is returned and what is raised: as for `generate`.
        """
        arrival = time.perf_counter()
        texts = [self._rendered(conversation) for conversation in conversations(messages)]
        return self._run(texts, sampling_params, arrival, progress, options)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        options: RequestOptions | None = None,
    ) -> Generator[Delta]:
        """Answer one prompt, or one conversation, piece by piece; the last delta carries the result.

        Several streams may be read in turn; each read advances all. Closing the iterator aborts the request.
        Raises RequestError where neither or both of prompt and messages are given, and as `generate` does.
        """
        arrival = time.perf_counter()
        text, ids = self._one(prompt, messages)
        [params] = params_for(sampling_params, 1)
        check_options(options)
        request_id = self._submit(text, ids, params, arrival, options)
        deltas = self._deltas(request_id)
        next(deltas)  # into its `try`: from here on, closing or dropping it aborts the request, read or not
        return deltas

    def pin(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        ttl: float | None = None,
        options: RequestOptions | None = None,
    ) -> int:
        """Keep the full blocks of a prompt, or a conversation, from eviction; returns the tokens kept.

        It is computed first where it is not cached. The tiers hold it where they have it all, else the pool,
        as long as no request needs that room. ttl: for so many seconds (None: until `unpin`). Raises
        RequestError as `stream` does, and for a ttl that is not above 0.
        """
        if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
            raise RequestError(f"ttl is {ttl!r}; give seconds above 0, or None for ever")
        text, ids = self._one(prompt, messages)
        self._run(
            [(text, ids)], SamplingParams(temperature=0, max_tokens=1), time.perf_counter(), None, options
        )
        return self.engine.pin(ids, self.engine.extras(options or RequestOptions()), ttl)

    def unpin(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        options: RequestOptions | None = None,
    ) -> bool:
        """Undo `pin`; False if there was none, or its time is over."""
        check_options(options)
        extras = self.engine.extras(options or RequestOptions())
        return self.engine.unpin(self._one(prompt, messages)[1], extras)

    def abort(self, request_id: str) -> bool:
        """End a request where it stands; False if it is not being served."""
        return self.engine.abort(request_id)

    def close(self) -> None:
        """Abort what is still being served, and write to the tiers what is on its way there, then close them.

        Streams that are being read end with that. Harmless the second time.
        """
        for request_id in list(self._inboxes):
            self.engine.abort(request_id)
        self._pump()
        self._inboxes.clear()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, prompt: Prompt | None, messages: Messages | None) -> tuple[str | None, list[int]]:
        if (prompt is None) == (messages is None):
            raise RequestError("give either a prompt or messages")
        if prompt is not None:
            return text_and_ids(prompt, self.tokenizer.encode)
        return self._rendered(messages or ())

    def _rendered(self, messages: Messages) -> tuple[str, list[int]]:
        text = self.loaded.chat_template.render(messages)
        return text, self.tokenizer.encode(text, parse_special=True)

    def _run(
        self,
        texts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        arrival: float,
        progress: Callable[[int, int], None] | None,
        options: RequestOptions | None,
    ) -> list[RequestOutput]:
        params = params_for(sampling_params, len(texts))
        check_options(options)
        check_callback("progress", progress)
        ids: list[str] = []
        results: dict[str, RequestOutput] = {}
        try:
            for (text, tokens), own in zip(texts, params, strict=True):
                ids.append(self._submit(text, tokens, own, arrival, options))
            collecting = set(ids)
            while len(results) < len(ids):
                for delta in self._pump(collecting):
                    results[delta.request_id] = delta.result  # type: ignore[assignment]
                    if progress is not None:
                        progress(len(results), len(ids))
        finally:
            for request_id in ids:
                self._forget(request_id)
        return [results[request_id] for request_id in ids]

    def _submit(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams,
        arrival: float,
        options: RequestOptions | None,
    ) -> str:
        request_id = f"request-{next(self._numbers)}"
        self.engine.add_request(request_id, tokens, params, prompt=text, options=options, arrival=arrival)
        self._inboxes[request_id] = deque()
        return request_id

    def _deltas(self, request_id: str) -> Generator[Delta]:
        """The deltas of a request, after an empty one that only starts the generator."""
        inbox = self._inboxes[request_id]
        delta = Delta(request_id, index=0, text="", token_ids=[])
        try:
            while delta.result is None:
                yield delta
                while not inbox:
                    self._pump()
                delta = inbox.popleft()
            yield delta
        finally:
            self._forget(request_id)

    def _pump(self, collecting: Set[str] = frozenset()) -> list[Delta]:
        """Advance the engine a step and sort what is new to its readers.

        Of the requests in `collecting` only the last deltas are kept, and returned.
        """
        last: list[Delta] = []
        for delta in self.engine.step():
            if delta.request_id in collecting:
                if delta.result is not None:
                    last.append(delta)
            elif (inbox := self._inboxes.get(delta.request_id)) is not None:
                inbox.append(delta)
        return last

    def _forget(self, request_id: str) -> None:
        if self._inboxes.pop(request_id, None) is not None:
            self.engine.abort(request_id)
