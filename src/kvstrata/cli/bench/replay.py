"""A trace of block ids replayed through a cache of fixed size that the production policies govern."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.cache.policies import make_policy
from kvstrata.cache.policy import Meta
from kvstrata.errors import ConfigError

SOON_SECONDS = 60.0  # a block computed again so soon after it was evicted is thrash


@dataclass(frozen=True)
class Arrival:
    """A request: when, in seconds, and the keys of its prompt's blocks in order."""

    at: float
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class Outcome:
    """hit_ratio: share of blocks found, each with all before it. thrash: share of blocks computed that had
    been evicted less than a minute before.
    """

    hit_ratio: float
    thrash: float


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a Mooncake trace (JSON lines, gzip or not). Raises ConfigError for another file."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        rows = [json.loads(line) for line in text.splitlines()]
        return [
            Arrival(row["timestamp"] / 1e3, tuple(int(n).to_bytes(8, "big") for n in row["hash_ids"]))
            for row in rows
        ]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"trace {str(path)!r} cannot be read ({error}); give JSON lines with timestamp and hash_ids"
        ) from None


def replay(
    arrivals: Iterable[Arrival],
    policy_name: str,
    capacity: int,
    *,
    ttl: float | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> Outcome:
    """Serve a trace from `capacity` blocks. ttl: seconds that a block lives (None: for ever)."""
    policy = make_policy(policy_name)
    evicted: dict[bytes, float] = {}
    total = hits = computed = again = 0
    for arrival in arrivals:
        now, keys = arrival.at, arrival.keys
        policy.expired(now)
        found = next((n for n, key in enumerate(keys) if key not in policy), len(keys))
        policy.touch(keys[:found], now)
        total, hits = total + len(keys), hits + found
        own = frozenset(keys)
        for depth, key in enumerate(keys[found:], found):
            computed += 1
            again += now - evicted.get(key, float("-inf")) < SOON_SECONDS
            if key in policy:  # an island behind a gap
                policy.touch([key], now)
                continue
            if len(policy) >= capacity:
                gone = policy.victims(1, own, now)
                if not gone:
                    break  # the request alone fills the cache
                evicted[gone[0]] = now
            deadline = float("inf") if ttl is None else now + ttl
            parent = keys[depth - 1] if depth else b""
            policy.insert(key, Meta(parent=parent, depth=depth, born=now, deadline=deadline), now)
        on_request()
    return Outcome(hits / max(total, 1), again / max(computed, 1))


def most_hits(arrivals: Iterable[Arrival]) -> float:
    """The hit ratio of a cache without limit."""
    known: set[bytes] = set()
    total = hits = 0
    for arrival in arrivals:
        total += len(arrival.keys)
        hits += next((n for n, key in enumerate(arrival.keys) if key not in known), len(arrival.keys))
        known.update(arrival.keys)
    return hits / max(total, 1)
