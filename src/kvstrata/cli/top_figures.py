"""The figures of a running server: what it tells now, and what came of the last few readings."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvstrata.cli import top_samples
from kvstrata.cli.top_samples import Samples, growth, quantiles, rate

_WINDOW = 10.0  # seconds that rates and times are of
_KEPT = 240  # readings that the course of the hit ratio has
_SHARES = (0.5, 0.9)


class Figures:
    """Collects readings of one server; figures that it does not tell are None."""

    def __init__(self) -> None:
        self._readings: deque[Samples] = deque()
        self._cache: dict[str, Any] = {}
        self.course: deque[float | None] = deque(maxlen=_KEPT)  # hit ratio between readings, the newest last

    def add(self, samples: Samples, cache: dict[str, Any]) -> None:
        """A reading. cache: what `/v1/cache` tells."""
        if self._readings:
            self.course.append(_hit_ratio(self._readings[-1], samples))
        self._readings.append(samples)
        self._cache = cache
        while len(self._readings) > 2 and samples.at - self._readings[1].at >= _WINDOW:
            self._readings.popleft()

    def now(self) -> dict[str, Any]:
        """All figures, as `kvstrata top --once --json` prints them. Rates are of the last ten seconds."""
        old, new = self._readings[0], self._readings[-1]
        return {
            "model": new.label("info", "model"),
            "version": new.label("info", "version"),
            "failed": new.value("up") == 0,
            "draining": new.value("draining") == 1,
            "requests": {
                "running": _first(new.value("num_requests_running"), self._cache.get("requests_running")),
                "waiting": _first(new.value("num_requests_waiting"), self._cache.get("requests_waiting")),
                "finished": new.value("request_success_total"),
                "finished_per_second": rate(old, new, "request_success_total"),
                "preemptions": _first(new.value("num_preemptions_total"), self._cache.get("preemptions")),
            },
            "ttft_ms": _times(old, new, "time_to_first_token_seconds"),
            "itl_ms": _times(old, new, "inter_token_latency_seconds"),
            "tokens_per_second": {
                "prefill": rate(old, new, "prefill_tokens_total"),
                "decode": rate(old, new, "decode_tokens_total"),
                "answers": rate(old, new, "generation_tokens_total"),
            },
            "hit_ratio": {
                "now": _hit_ratio(old, new),
                "recent": _first(new.value("prefix_cache_hit_ratio"), self._cache.get("recent_hit_ratio")),
                "since_start": self._cache.get("hit_ratio"),
            },
            "memory_pressure": _first(new.value("memory_pressure"), self._cache.get("usage")),
            "evictions": {
                "total": self._evictions(new),
                "per_second": rate(old, new, "kv_evictions_total"),
                "thrashed_tokens": _first(
                    new.value("kv_thrashed_tokens_total"), self._cache.get("thrashed_tokens")
                ),
                "thrashed_tokens_per_second": rate(old, new, "kv_thrashed_tokens_total"),
            },
            "places": [self._pool(new), *self._tiers(new)],
        }

    def _evictions(self, samples: Samples) -> dict[str, float] | None:
        told = samples.labelled("kv_evictions_total", "reason")
        if told or "pool" not in self._cache:
            return told or None
        sums: dict[str, float] = {}
        for group in self._cache["pool"]:
            for reason, count in group["evictions"].items():
                sums[reason] = sums.get(reason, 0) + count
        return sums

    def _pool(self, samples: Samples) -> dict[str, Any]:
        bytes_of = samples.labelled("kv_pool_bytes", "state")
        groups = self._cache.get("pool", [])
        blocks = {
            state: sum(group[f"{state}_blocks"] for group in groups) for state in ("held", "cached", "total")
        }
        total = sum(bytes_of.values()) or blocks["total"]
        held, cached = (
            bytes_of.get(state, 0.0) if bytes_of else blocks[state] for state in ("held", "cached")
        )
        return {
            "name": "pool",
            "state": None,
            "held_share": held / total if total else None,
            "used_share": (held + cached) / total if total else None,
            "used_bytes": held + cached if bytes_of else None,
            "capacity_bytes": sum(bytes_of.values()) if bytes_of else None,
        }

    def _tiers(self, samples: Samples) -> list[dict[str, Any]]:
        used = samples.labelled("tier_usage_bytes", "tier")
        capacity = samples.labelled("tier_capacity_bytes", "tier")
        states = {
            labels["tier"]: labels.get("state")
            for labels, value in samples.rows.get(top_samples.PREFIX + "tier_state", ())
            if value == 1 and "tier" in labels
        }
        rows = [(name, used[name], capacity.get(name), states.get(name)) for name in used] or [
            (tier["name"], tier["used_bytes"], tier["capacity_bytes"], tier["state"])
            for tier in self._cache.get("tiers", ())
        ]
        return [
            {
                "name": name,
                "state": state,
                "held_share": None,
                "used_share": bytes_used / most if most else None,
                "used_bytes": bytes_used,
                "capacity_bytes": most,
            }
            for name, bytes_used, most, state in rows
        ]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _hit_ratio(old: Samples, new: Samples) -> float | None:
    """Share of the prompt tokens found in between; None where none were looked for."""
    looked, found = (growth(old, new, f"prefix_cache_{what}_total") for what in ("queries", "hits"))
    return found / looked if looked and found is not None else None


def _times(old: Samples, new: Samples, name: str) -> dict[str, float | None]:
    """Quantiles in milliseconds, of the window and of all time."""
    recent = quantiles(old, new, name, _SHARES) if new.at > old.at else None
    whole = quantiles(None, new, name, _SHARES)
    return {
        "p50": None if recent is None else recent[0] * 1e3,
        "p90": None if recent is None else recent[1] * 1e3,
        "p50_since_start": None if whole is None else whole[0] * 1e3,
        "p90_since_start": None if whole is None else whole[1] * 1e3,
    }
