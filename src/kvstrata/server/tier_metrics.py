"""Metrics of the tiers below the pool; a server without tiers has none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import Metric

from kvstrata.engine.tiering import Tiering
from kvstrata.server.families import counters, gauges
from kvstrata.tiers.stack import TierStats
from kvstrata.tiers.tier import MissReason, ServerUsage

# Of the reasons why a load misses, those that do not mean that what was there is not what it should be.
_NOT_THERE = frozenset(("absent", "expired", "io_error", "unavailable", "closed"))
_VERIFICATION = tuple(reason for reason in get_args(MissReason) if reason not in _NOT_THERE)
_STATES = ("closed", "half-open", "open")

Named = Sequence[tuple[str, TierStats]]


def named(stats: Sequence[TierStats]) -> list[tuple[str, TierStats]]:
    """Tiers by names that differ: a second disk is `disk-2`."""
    seen: Counter[str] = Counter()
    found = []
    for each in stats:
        seen[each.name] += 1
        found.append((each.name if seen[each.name] == 1 else f"{each.name}-{seen[each.name]}", each))
    return found


_Figure = tuple[str, str, Callable[[TierStats], float]]
_COUNTERS: tuple[_Figure, ...] = (
    ("tier_stores", "Blocks stored.", lambda s: s.usage.stores),
    ("tier_loads", "Blocks loaded and verified.", lambda s: s.usage.loads),
    ("tier_stored_bytes", "Bytes stored.", lambda s: s.usage.stored_bytes),
    ("tier_loaded_bytes", "Bytes loaded.", lambda s: s.usage.loaded_bytes),
    ("tier_store_seconds", "Seconds that stores took.", lambda s: s.usage.store_seconds),
    ("tier_load_seconds", "Seconds that loads took.", lambda s: s.usage.load_seconds),
    ("tier_breaker_trips", "Times that a tier was left alone for failing.", lambda s: s.trips),
)

_OfServer = tuple[str, str, Callable[[ServerUsage], float]]
_SERVER_COUNTERS: tuple[_OfServer, ...] = (
    ("tier_server_calls", "Small calls answered, such as look-ups.", lambda s: s.calls),
    ("tier_server_call_seconds", "Seconds that small calls took.", lambda s: s.call_seconds),
    ("tier_server_loaded_bytes", "Bytes of values received.", lambda s: s.loaded_bytes),
    ("tier_server_load_seconds", "Seconds that receiving values took.", lambda s: s.load_seconds),
    ("tier_server_stored_bytes", "Bytes of values sent.", lambda s: s.stored_bytes),
    ("tier_server_store_seconds", "Seconds that sending values took.", lambda s: s.store_seconds),
    ("tier_server_breaker_trips", "Times that a server was left alone for failing.", lambda s: s.trips),
    ("tier_server_repairs", "Values that a server was given since it had missed them.", lambda s: s.repairs),
    ("tier_server_copies", "Values that a server was given since it is new.", lambda s: s.copies),
)
_SERVER_ERRORS = ("down", "timeout", "broken", "refuses")


def tier_metrics(tiering: Tiering, tiers: Named) -> Iterator[Metric]:
    """The families of some tiers."""
    yield gauges("tier_usage_bytes", "Bytes used.", ("tier",), (((n,), s.usage.used_bytes) for n, s in tiers))
    yield gauges(
        "tier_capacity_bytes",
        "Most bytes.",
        ("tier",),
        (((n,), s.usage.capacity_bytes) for n, s in tiers if s.usage.capacity_bytes is not None),
    )
    yield gauges("tier_records", "Blocks held.", ("tier",), (((n,), s.usage.records) for n, s in tiers))
    yield gauges(
        "tier_state",
        "1 for the state that a tier's breaker is in; open: it is left alone.",
        ("tier", "state"),
        (((n, state), float(s.state == state)) for n, s in tiers for state in _STATES),
    )
    for name, text, figure in _COUNTERS:
        yield counters(name, text, ("tier",), [((n,), figure(s)) for n, s in tiers])
    yield counters(
        "tier_verification_failures",
        "Blocks that were not what they should be, removed and not served, by reason.",
        ("tier", "reason"),
        (((n, reason), s.usage.misses[reason]) for n, s in tiers for reason in _VERIFICATION),
    )
    yield counters(
        "tier_load_misses",
        "Blocks that were found and could not be had, by reason.",
        ("tier", "reason"),
        (((n, reason), s.usage.misses[reason]) for n, s in tiers for reason in sorted(_NOT_THERE)),
    )
    yield counters(
        "tier_queue_drops",
        "Blocks on their way to a tier that it did not get, or did not keep, by reason.",
        ("tier", "reason"),
        (((n, reason), count) for n, s in tiers for reason, count in _drops(s).items()),
    )
    yield from _server_metrics([(n, server) for n, s in tiers for server in s.usage.servers])
    audit = tiering.audit.counts
    outcomes = (("checked", audit.checked), ("mismatches", audit.mismatches), ("skipped", audit.skipped))
    yield counters(
        "audit_blocks",
        "Loaded blocks computed again and compared, by outcome; mismatches are among the checked.",
        ("outcome",),
        [((outcome,), count) for outcome, count in outcomes],
    )
    yield gauges(
        "tier_unstored_blocks",
        "Blocks of the pool that no tier could take yet.",
        (),
        [((), tiering.offload.dirty)],
    )


def _server_metrics(servers: Sequence[tuple[str, ServerUsage]]) -> Iterator[Metric]:
    """Families of the servers of tiers that have several, each by its tier and host:port."""
    yield gauges(
        "tier_server_state",
        "1 for the state that a server's breaker is in; open: it is left alone.",
        ("tier", "server", "state"),
        (((n, s.name, state), float(s.state == state)) for n, s in servers for state in _STATES),
    )
    for name, text, figure in _SERVER_COUNTERS:
        yield counters(name, text, ("tier", "server"), [((n, s.name), figure(s)) for n, s in servers])
    yield counters(
        "tier_server_errors",
        "Calls that failed, by kind.",
        ("tier", "server", "kind"),
        (((n, s.name, kind), s.errors[kind]) for n, s in servers for kind in _SERVER_ERRORS),
    )


def _drops(stats: TierStats) -> dict[str, int]:
    return {"queue_full": 0, "unavailable": 0, **stats.queue_drops}
