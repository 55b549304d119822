"""`/metrics`: the engine's figures in Prometheus' text format, under vLLM's names where it has one.

To read them takes a few milliseconds, never waits for a step, and for a tier `_TIER_WAIT` at most. Labels
have few values, all of them ours: no request, key or prompt makes a new series. docs/metrics.md lists all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstrata.server.families import by, counter, counters, gauge, gauges, histogram
from kvstrata.server.front import RequestLine
from kvstrata.server.service import Service
from kvstrata.server.sharing_metrics import sharing_metrics
from kvstrata.server.tier_metrics import Named, tier_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIER_WAIT = 0.005  # seconds for each tier to tell what it holds
_SOURCES = ("pool", "shared", "computed")
_FINISH_REASONS = ("stop", "length", "abort", "error")
_EVICT_REASONS = ("space", "expired", "unreachable", "reset", "wrong")
_PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/cache", "/health", "/ready"),
        *(
            "/v1/cache/reset",
            "/v1/cache/pin",
            "/v1/cache/unpin",
            "/v1/cache/members",
            "/metrics",
            "/docs",
            "/openapi.json",
        ),
    )
)


class HttpCounts:
    """Requests by path and status; used in the event loop only. All paths that there are not count as one."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()

    def add(self, line: RequestLine) -> None:
        """A request was answered, or its client has left (499)."""
        shown = line.path if line.path in _PATHS else "other"
        if line.path.startswith("/v1/models/"):
            shown = "/v1/models"
        self.requests[shown, str(line.status)] += 1


class Metrics:
    """What a service tells Prometheus. http: counts of its front. version: of kvstrata."""

    def __init__(self, service: Service, http: HttpCounts, version: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(service, http, version))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics; may be called from any thread."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, service: Service, http: HttpCounts, version: str) -> None:
        self._service = service
        self._http = http
        self._version = version

    def describe(self) -> list[Metric]:
        return []  # so that registering it reads nothing

    def collect(self) -> Iterator[Metric]:
        tiering = self._service.engine.tiering
        tiers = self._service.tier_stats(_TIER_WAIT)
        yield from self._requests()
        yield from self._work()
        yield from self._speculation()
        yield from self._hits(tiers)
        yield from self._pool()
        yield from self._evictions(tiers)
        if tiering is not None:
            yield from tier_metrics(tiering, tiers)
        yield from sharing_metrics(self._service.engine)
        yield from self._server()

    def _requests(self) -> Iterator[Metric]:
        engine, serving = self._service.engine, self._service.serving
        told = engine.telemetry
        running = len({id(each.request) for each in [*engine.scheduler.running, *engine.scheduler.loading]})
        waiting = max(0, serving.open_requests - running)
        yield gauge("num_requests_running", "Requests that have their place in the pool.", running)
        yield gauge("num_requests_waiting", "Requests that wait for a place.", waiting)
        yield counter("num_preemptions", "Times a sequence gave up its blocks.", engine.scheduler.preemptions)
        yield counters(
            "request_success",
            "Requests that have ended, by reason; each once, preempted or not.",
            ("finished_reason",),
            by(dict(told.finished), _FINISH_REASONS),
        )
        for name, text, values in (
            ("time_to_first_token_seconds", "From submission to the first token.", told.first_token_seconds),
            ("inter_token_latency_seconds", "Between two tokens of an answer.", told.inter_token_seconds),
            ("e2e_request_latency_seconds", "From submission to the end.", told.request_seconds),
            ("request_queue_time_seconds", "From submission to a place in the pool.", told.queue_seconds),
        ):
            yield histogram(name, text, values.read())

    def _work(self) -> Iterator[Metric]:
        told = self._service.engine.telemetry
        yield counter("prompt_tokens", "Tokens of prompts that are in the pool.", told.prompt_tokens)
        yield counter("generation_tokens", "Tokens of answers.", told.generation_tokens)
        yield counter("prefill_tokens", "Tokens computed in prefill, again or not.", told.prefill_tokens)
        yield counter("prefill_seconds", "Seconds of steps that prefill took.", told.prefill_seconds)
        yield counter("decode_tokens", "Tokens computed in decode.", told.decode_tokens)
        yield counter("decode_seconds", "Seconds of steps that decode took.", told.decode_seconds)
        yield counter("steps", "Steps of the engine.", told.steps)

    def _speculation(self) -> Iterator[Metric]:
        told = self._service.engine.telemetry.speculation
        yield counter("spec_decode_num_drafts", "Runs of proposed tokens.", told.drafts)
        yield counter("spec_decode_num_draft_tokens", "Tokens proposed.", told.draft_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted.", told.accepted_tokens)
        places = list(told.accepted_by_position) or [0]
        yield counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Runs whose token at this place, and all before it, were accepted.",
            ("position",),
            [((str(place),), count) for place, count in enumerate(places)],
        )
        yield gauge(
            "spec_decode_draft_acceptance_rate", "Share accepted since start.", told.acceptance or 0.0
        )

    def _hits(self, tiers: Named) -> Iterator[Metric]:
        told = self._service.engine.telemetry
        sources = (*_SOURCES, *(each.name for _, each in tiers))
        yield counter("prefix_cache_queries", "Prompt tokens looked for in the cache.", told.queried)
        yield counter("prefix_cache_hits", "Prompt tokens found there.", told.hits)
        yield gauge("prefix_cache_hit_ratio", "Share found, of the last five minutes.", told.hit_ratio)
        yield counters(
            "prompt_tokens_cached_by_source",
            "Prompt tokens by where their K and V came from.",
            ("source",),
            by(dict(told.by_source), sources),
        )
        yield counters(
            "tier_recomputed_tokens",
            "Tokens that were looked for in the tiers and computed, by reason.",
            ("reason",),
            by(dict(told.recomputed), ("absent", "cost", "failed")),
        )

    def _pool(self) -> Iterator[Metric]:
        held = cached = free = total = 0
        usage = pressure = 0.0
        for group in self._service.engine.cache.groups:
            pool, stride = group.pool, group.pool.layout.stride_bytes
            blocks, kept = pool.num_blocks, pool.num_cached
            idle = pool.num_free
            in_use = min(max(0, blocks - idle - kept), blocks)  # read while blocks change hands
            held, cached, free = held + in_use * stride, cached + kept * stride, free + idle * stride
            total += blocks * stride
            usage = max(usage, in_use / blocks)
            pressure = max(pressure, min(1.0, (in_use + max(0, group.reserved)) / blocks))
        yield gauge("kv_cache_usage_perc", "Share of the pool's blocks that requests hold (1: all).", usage)
        yield gauge("memory_pressure", "Share of the pool that requests hold or were promised.", pressure)
        states = {"held": held, "cached": cached, "free": free}
        yield gauges("kv_pool_bytes", "Bytes of the pool by state.", ("state",), by(states))
        yield gauge("kv_pool_capacity_bytes", "Bytes of the pool.", total)

    def _evictions(self, tiers: Named) -> Iterator[Metric]:
        engine = self._service.engine
        life = engine.telemetry.blocks
        pool = {**dict.fromkeys(_EVICT_REASONS, 0), **dict(life.evictions)}
        rows = [(("pool", engine.cache.policy, reason), count) for reason, count in pool.items()]
        for name, each in tiers:
            reasons = {"space": 0, "expired": 0, **each.usage.evictions}
            rows += [((name, each.usage.policy, reason), count) for reason, count in reasons.items()]
        yield counters(
            "kv_evictions",
            "Blocks that can no longer be found, by place, policy and reason.",
            ("tier", "policy", "reason"),
            rows,
        )
        rate = engine.telemetry.eviction_rate
        yield gauge("kv_eviction_rate", "Blocks a second evicted for space, of the last minute.", rate)
        yield counter("kv_thrashed_tokens", "Tokens computed again soon after eviction.", life.thrashed)
        for name, text, values in (
            ("kv_block_lifetime_seconds", "From a block's publication to its eviction.", life.lifetime),
            ("kv_block_idle_before_evict_seconds", "From its last use to its eviction.", life.idle),
            ("kv_block_reuse_gap_seconds", "From a block's last use to the next.", life.reuse),
        ):
            yield histogram(name, text, values.read())

    def _server(self) -> Iterator[Metric]:
        service, cache = self._service, self._service.engine.cache
        requests = dict(self._http.requests)
        yield counters("http_requests", "By path and status.", ("path", "status"), requests.items())
        yield gauge("up", "1 while the engine works, 0 once it has failed.", float(service.serving.healthy))
        yield gauge("draining", "1 while no new requests are taken.", float(service.admission.draining))
        yield counter("log_lines_dropped", "Lines that the log could not take.", service.log.dropped)
        labels = (self._version, service.served.name, str(cache.block_size), cache.policy)
        yield gauges("info", "What is served.", ("version", "model", "block_size", "policy"), [(labels, 1)])
