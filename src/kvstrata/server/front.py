"""What every request passes before the endpoints: a line in the log, its key, and its body within bounds."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.engine.outputs import RequestOutput
from kvstrata.server.keys import ApiKey, KeyRing
from kvstrata.server.problems import ApiError
from kvstrata.server.request_log import RequestLog

OPEN_PATHS = frozenset(("/health", "/ready", "/docs", "/openapi.json"))
METRICS_PATH = "/metrics"
# Asked every few seconds; logged only where they fail.
_QUIET_PATHS = frozenset(("/health", "/ready", METRICS_PATH))
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_VALUE_MARKS = (b",", b"[", b"{")
_LINGER = 1.0  # seconds to go on reading what is refused, so that the client gets to read the answer
_LINE, _KEY, _SEND = "kvstrata.line", "kvstrata.key", "kvstrata.send"


@dataclass
class RequestLine:
    """What the log tells of one request. arrival: by the engine's clock; began: by the monotonic clock."""

    request_id: str
    method: str
    path: str
    arrival: float
    began: float = field(default_factory=time.monotonic)
    key: str | None = None
    status: int = 500  # until something else is sent
    stream: bool | None = None
    error: str | None = None
    prompts: dict[str, Any] | None = None
    told: dict[str, Any] = field(default_factory=dict)

    def note(self, results: Sequence[RequestOutput], *, with_texts: bool) -> None:
        """Add the figures of the engine's requests; times are the first one's."""
        if not results:
            return
        cached: dict[str, int] = {}
        for result in results:
            for source, tokens in result.usage.cached_by_source.items():
                if tokens:
                    cached[source] = cached.get(source, 0) + tokens
        prompt_tokens = sum(result.usage.prompt_tokens for result in results)
        timings = results[0].timings
        self.told = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(result.usage.completion_tokens for result in results),
            "cached": {**cached, "computed": prompt_tokens - sum(cached.values())},
            "queue_ms": round(timings.queue * 1e3, 3),
            "ttft_ms": round(timings.ttft * 1e3, 3),
            "preemptions": sum(result.timings.preemptions for result in results),
            "finish_reason": ",".join(a.finish_reason for result in results for a in result.outputs),
        }
        if with_texts:
            self.told["answers"] = [answer.text for result in results for answer in result.outputs]

    def fields(self) -> dict[str, Any]:
        """The line's fields."""
        return {
            "id": self.request_id,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "stream": self.stream,
            **self.told,
            "total_ms": round((time.monotonic() - self.began) * 1e3, 3),
            "error": self.error,
            **(self.prompts or {}),
        }


def line_of(scope: Scope) -> RequestLine:
    """The log line of a request."""
    line: RequestLine = scope[_LINE]
    return line


def key_of(scope: Scope) -> ApiKey | None:
    """The key that a request came with, if it is one of ours."""
    key: ApiKey | None = scope[_KEY]
    return key


def body_send(scope: Scope) -> Send:
    """The way for parts of a body once the start is sent: past everything that only looks at the start."""
    send: Send = scope[_SEND]
    return send


class Front:
    """An application with its log, keys and limits around it. max_body: bytes; body_timeout: seconds.

    max_values: commas and opening brackets of a body, about as many as there are values in it: parsers go
    through these without a break, and nobody else is served meanwhile.
    clock: the engine's, which times to the first token are measured by. on_answered: called with every
    request's line. guards_metrics: /metrics needs the metrics key or the admin key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        log: RequestLog,
        *,
        max_body: int,
        max_values: int,
        body_timeout: float,
        clock: Callable[[], float],
        on_answered: Callable[[RequestLine], None],
        guards_metrics: bool,
    ) -> None:
        self._app = app
        self._keys = keys
        self._log = log
        self._max_body = max_body
        self._max_values = max_values
        self._body_timeout = body_timeout
        self._clock = clock
        self._on_answered = on_answered
        self._guards_metrics = guards_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not spoken here")
        line = RequestLine(_request_id(scope), scope["method"], scope["path"], self._clock())
        scope[_LINE] = line
        scope[_SEND] = send
        told = (b"x-request-id", line.request_id.encode())

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message["headers"] = [*message["headers"], told]
            await send(message)

        try:
            await self._serve(scope, receive, noting, line)
        finally:
            self._on_answered(line)
            if line.path not in _QUIET_PATHS or line.status >= 400:
                self._log.write("request", **line.fields())

    async def _serve(self, scope: Scope, receive: Receive, send: Send, line: RequestLine) -> None:
        try:
            key = scope[_KEY] = self._key(scope)
            line.key = None if key is None else key.name
            body = await self._read(scope, receive)
        except ApiError as error:
            line.error = str(error)
            error.headers["connection"] = "close"
            await _linger(receive)
            await error.response()(scope, receive, send)
            return
        except _LeftError:
            line.status, line.error = 499, "the client has left"
            return
        await self._app(scope, _replay(body, receive), send)

    def _key(self, scope: Scope) -> ApiKey | None:
        """The key in the request's header. Raises ApiError where one is needed and it is none."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, secret = header.decode("latin-1").partition(" ")
        key = self._keys.find(secret.strip()) if scheme.lower() == "bearer" else None
        is_metrics = scope["path"] == METRICS_PATH
        needed = self._guards_metrics if is_metrics else self._keys.required
        if scope["path"] in OPEN_PATHS:
            return key
        wrong_kind = key is not None and not key.admin and key.metrics != is_metrics
        if key is not None and wrong_kind and (key.metrics or needed):
            raise ApiError(
                403,
                f"the key {key.name!r} does not open this; {METRICS_PATH} takes the metrics key or the admin "
                "key, all else the API keys",
                code="wrong_kind_of_key",
            )
        if key is None and needed:
            raise ApiError(
                401,
                "the API key is wrong; send a header 'Authorization: Bearer KEY'"
                if header
                else "there is no API key; send a header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return key

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The request's body. Raises ApiError where it is too long, or too long in coming."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._check_length(int(length) if length.isdigit() else 0)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _LeftError
                    part = message.get("body", b"")
                    size += len(part)
                    self._check_length(size)
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._body_timeout:g} s (body_timeout)",
                code="body_timeout",
            ) from None
        body = b"".join(parts)
        if sum(map(body.count, _VALUE_MARKS)) > self._max_values:
            raise ApiError(
                413,
                f"the body has more than {self._max_values} commas and opening brackets, so more values or "
                "text than can be served: send less",
                code="body_too_large",
            )
        return body

    def _check_length(self, size: int) -> None:
        if size > self._max_body:
            raise ApiError(
                413,
                f"the body has more than {self._max_body} bytes (max_body): send less",
                code="body_too_large",
            )


class _LeftError(Exception):
    """The client left while its body was being read."""


def _request_id(scope: Scope) -> str:
    """What the client calls the request, for logs; the engine's own ids are never a client's to choose."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body which was read before, and then what comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _linger(receive: Receive) -> None:
    """Read on for a moment: a connection closed over unread bytes takes the answer with it."""
    try:
        async with asyncio.timeout(_LINGER):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
