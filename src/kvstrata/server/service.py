"""What endpoints share: the model served, its texts, the way to the engine, and the totals."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstrata.config import RequestOptions
from kvstrata.engine.engine import Engine
from kvstrata.engine.outputs import RequestOutput
from kvstrata.engine.serving import Serving
from kvstrata.models.chat import ChatTemplate
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.server.admission import Admission
from kvstrata.server.call import Call
from kvstrata.server.keys import ApiKey, KeyRing
from kvstrata.server.problems import ApiError
from kvstrata.server.request_log import RequestLog
from kvstrata.server.requests import GenerationRequest
from kvstrata.server.settings import ServerConfig
from kvstrata.server.tier_metrics import Named, named
from kvstrata.server.tracing import Tracing

T = TypeVar("T")
_TEXT_THREADS = 2


@dataclass(frozen=True)
class Served:
    """The model as clients know it. created: seconds since 1970."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    created: int


class Service:
    """One model behind HTTP; made and used in one event loop.

    max_running: sequences that run at once; max_queue more may wait. clock: the engine's. tracing: None: off.
    """

    def __init__(
        self,
        engine: Engine,
        served: Served,
        config: ServerConfig,
        keys: KeyRing,
        log: RequestLog,
        *,
        max_running: int,
        clock: Callable[[], float] = time.perf_counter,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.served = served
        self.config = config
        self.keys = keys
        self.log = log
        self.clock = clock
        self.tracing = tracing
        limit = max_running + config.max_queue
        self.admission = Admission(limit, config.max_requests_per_key)
        self.serving = Serving(engine, max_open=limit)
        self.calls: set[Call] = set()
        self.prompt_tokens = 0  # of requests that are finished
        self.cached_tokens: Counter[str] = Counter()  # of these, by source
        self._texts = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="kvstrata-text")

    async def in_text_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what takes a text's length of time (templates, tokenizers) beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *arguments)

    async def on_engine_thread(self, function: Callable[[], T]) -> T:
        """Run something between two steps of the engine. Raises StoppedError."""
        return await asyncio.wrap_future(self.serving.call(function))

    @property
    def guards_metrics(self) -> bool:
        """Whether /metrics needs the metrics key or the admin key."""
        return not self.config.open_metrics and (self.keys.required or self.keys.has_metrics)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the one served."""
        if name is not None and name != self.served.name:
            raise ApiError(
                404,
                f"model is {name!r}; this server has {self.served.name!r}",
                code="model_not_found",
                param="model",
            )

    def check_request(self, body: GenerationRequest, key: ApiKey | None, prompts: int) -> None:
        """Raise ApiError for what this server does not do, or does not let this key do."""
        self.check_model(body.model)
        body.refuse_unsupported()
        asked = (body.n or 1) * prompts
        if asked > self.config.max_n:
            raise ApiError(
                400,
                f"n is {body.n or 1} and there are {prompts} prompts; at most {self.config.max_n} answers "
                "may be asked for at once (max_n)",
                code="invalid_value",
                param="n",
            )
        least = 0 if self.config.min_priority is None and key is not None else self.config.min_priority
        if least is not None and (body.priority or 0) < least:
            raise ApiError(
                400,
                f"priority is {body.priority}; the least allowed is {least} (min_priority)",
                code="invalid_value",
                param="priority",
            )

    @property
    def usual_prompt_tokens(self) -> int:
        """Most tokens of a prompt that sees all before it, by which bodies are measured."""
        return self.config.max_prompt_tokens or self.engine.limits.max_model_len

    def check_length(self, tokens: Sequence[int], retention: str | None = None) -> None:
        """Raise ApiError for a prompt that is longer than allowed, RequestError for a bad retention.

        retention: the request's own, if it brings one.
        """
        limits = self.engine.limits
        most = limits.longest(limits.retention_of(retention)) - 1
        most = min(most, self.config.max_prompt_tokens or most)
        if len(tokens) > most:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens; at most {most} are served: shorten it",
                code="context_length_exceeded",
            )

    def salt(self, cache_salt: str, key: ApiKey | None) -> str:
        """The salt that blocks of this key's requests are found under."""
        return cache_salt if key is None or self.config.share_cache else key.salted(cache_salt)

    def options(self, body: GenerationRequest, key: ApiKey | None) -> RequestOptions:
        """How a request of this key is served: walled off from other keys, and fair to them."""
        salt = self.salt(body.cache_salt or "", key)
        return body.options(cache_salt=salt, user=(body.user or "") if key is None else key.name)

    def admit(self, key: str, count: int) -> Callable[[], None]:
        """Let requests in; returns what has to be called when they have ended. Raises ApiError."""
        self.admission.enter(key, count)
        began = time.monotonic()
        return lambda: self.admission.leave(key, count, time.monotonic() - began)

    @staticmethod
    def now() -> int:
        """Seconds since 1970."""
        return int(time.time())

    def count(self, result: RequestOutput) -> None:
        """Add a finished request to the totals."""
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens.update(result.usage.cached_by_source)

    def tier_stats(self, wait: float) -> Named:
        """What the tiers tell, each in at most so many seconds, or told last; from any thread."""
        tiering = self.engine.tiering
        return [] if tiering is None else named(tiering.stack.stats(wait))

    def close(self) -> None:
        """Let go of the threads that turn texts into tokens."""
        self._texts.shutdown(wait=False, cancel_futures=True)
