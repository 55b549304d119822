"""OpenTelemetry traces, an extra: a span for each request that generates, with its phases as events.

Names are those of OpenTelemetry's semantic conventions for generative AI; times in the engine that these do
not name are called as vLLM calls them. A span is made when its request has ended, from what the engine told,
and sent by a thread of the library's, from a queue with a bound: a collector that is slow, gone or wrong
costs spans, and never a request. Prompts and answers are in none.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from kvstrata.engine.outputs import RequestOutput
from kvstrata.errors import ConfigError
from kvstrata.server.front import RequestLine
from kvstrata.server.problems import ApiError
from kvstrata.server.requests import ChatRequest, GenerationRequest

_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_PATH = "/v1/traces"
_SEND_SECONDS = 5
_LAST_MS = 3_000  # for what is left to be sent when the server stops
_REQUESTED = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
_log = logging.getLogger(__name__)


def check_tracing() -> None:
    """Raise ConfigError where what it takes to send traces is not installed."""
    for package in _PACKAGES:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # what it is in is missing
            found = False
        if not found:
            raise ConfigError(
                f"otlp_endpoint needs {package}, which is not installed: pip install 'kvstrata[otel]'"
            )


class Tracing:
    """Sends a span for each request. endpoint: URL of the collector, with or without the path for traces."""

    def __init__(self, endpoint: str, version: str) -> None:
        # By name, since they are an extra.
        self._trace: Any = import_module("opentelemetry.trace")
        sdk: Any = import_module("opentelemetry.sdk.trace")
        export: Any = import_module("opentelemetry.sdk.trace.export")
        otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources: Any = import_module("opentelemetry.sdk.resources")
        context: Any = import_module("opentelemetry.trace.propagation.tracecontext")
        url = endpoint.rstrip("/") + (_PATH if urlsplit(endpoint).path in ("", "/") else "")
        told = resources.Resource.create({"service.name": "kvstrata", "service.version": version})
        self._provider: Any = sdk.TracerProvider(resource=told, shutdown_on_exit=False)
        self._provider.add_span_processor(
            export.BatchSpanProcessor(otlp.OTLPSpanExporter(url, timeout=_SEND_SECONDS))
        )
        self._tracer: Any = self._provider.get_tracer("kvstrata", version)
        self._propagator: Any = context.TraceContextTextMapPropagator()
        self._failed = False

    def record(
        self,
        line: RequestLine,
        body: GenerationRequest,
        results: Sequence[RequestOutput],
        *,
        model: str,
        headers: Mapping[str, str],
        error: ApiError | None,
    ) -> None:
        """Add the span of a request that ends now; raises nothing.

        headers: the request's own; `traceparent` makes the span a child. error: what it was answered with.
        """
        try:
            self._record(line, body, results, model=model, headers=headers, error=error)
        except Exception:  # whatever a library does: answers matter more
            if not self._failed:
                _log.warning("a request could not be traced; this is told once", exc_info=True)
            self._failed = True

    def _record(
        self,
        line: RequestLine,
        body: GenerationRequest,
        results: Sequence[RequestOutput],
        *,
        model: str,
        headers: Mapping[str, str],
        error: ApiError | None,
    ) -> None:
        end = time.time_ns()
        start = end - int((time.monotonic() - line.began) * 1e9)
        operation = "chat" if isinstance(body, ChatRequest) else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(dict(headers)),
            kind=self._trace.SpanKind.SERVER,
            attributes={**_asked(line, body, operation, model), **_told(results)},
            start_time=start,
        )
        for result in results:
            for name, seconds, attributes in _phases(result):
                span.add_event(name, attributes, start + int(seconds * 1e9))
        if error is not None:
            span.set_attribute("error.type", error.code or str(error.status))
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
        span.end(end)

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Raises nothing."""
        try:
            self._provider.force_flush(_LAST_MS)
            self._provider.shutdown()
        except Exception:
            _log.warning("the last traces could not be sent", exc_info=True)


def _asked(line: RequestLine, body: GenerationRequest, operation: str, model: str) -> dict[str, Any]:
    requested = {f"gen_ai.request.{name}": getattr(body, name) for name in _REQUESTED}
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvstrata",
        "gen_ai.request.model": body.model or model,
        "gen_ai.response.model": model,
        **{name: value for name, value in requested.items() if value is not None},
        "gen_ai.request.choice.count": body.n or 1,
        "kvstrata.request.id": line.request_id,
        "kvstrata.request.stream": bool(body.stream),
    }


def _told(results: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all results; times are the first one's."""
    if not results:
        return {}
    timings = results[0].timings
    return {
        "gen_ai.usage.input_tokens": sum(each.usage.prompt_tokens for each in results),
        "gen_ai.usage.output_tokens": sum(each.usage.completion_tokens for each in results),
        "gen_ai.usage.cache_read.input_tokens": sum(each.usage.cached_tokens for each in results),
        "gen_ai.response.finish_reasons": [a.finish_reason for each in results for a in each.outputs],
        "gen_ai.latency.time_in_queue": timings.queue,
        "gen_ai.latency.time_to_first_token": timings.ttft,
        "gen_ai.latency.e2e": timings.total,
        "kvstrata.preemptions": sum(each.timings.preemptions for each in results),
    }


def _phases(result: RequestOutput) -> list[tuple[str, float, dict[str, Any]]]:
    """Events of a result: name, seconds since the request's arrival at which it begins, attributes."""
    timings, usage = result.timings, result.usage
    cached = {f"cached_tokens.{source}": n for source, n in usage.cached_by_source.items() if n}
    phases: list[tuple[str, float, dict[str, Any]]] = [("queue", 0.0, {"seconds": timings.queue})]
    if timings.ttft:
        computed = {"computed_tokens": usage.prompt_tokens - usage.cached_tokens, **cached}
        phases += [
            ("prefill", timings.queue, {"seconds": timings.ttft - timings.queue, **computed}),
            (
                "decode",
                timings.ttft,
                {"seconds": timings.total - timings.ttft, "tokens": usage.completion_tokens},
            ),
        ]
    return phases
