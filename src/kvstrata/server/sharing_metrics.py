"""Metrics of what processes do for each other: leases on what they compute, and early refresh."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvstrata.engine.engine import Engine
from kvstrata.server.families import counter, counters


def sharing_metrics(engine: Engine) -> Iterator[Metric]:
    """The families of an engine; those of leases only where a tier keeps some."""
    refreshes = engine.refreshing.counts
    kinds = ("prolonged", "republished", "recomputed")
    yield counters(
        "refreshes",
        "Prefixes refreshed before they expired, by kind.",
        ("kind",),
        [((kind,), getattr(refreshes, kind)) for kind in kinds],
    )
    yield counter("refreshes_avoided", "Refreshes that another process had begun.", refreshes.avoided)
    election = None if engine.tiering is None else engine.tiering.loads.election
    if election is None:
        return
    leases = election.counts
    outcomes = ("wins", "waits", "takeovers", "timeouts", "lost", "unavailable")
    yield counters(
        "lease_outcomes",
        "Leases on what several processes lack, by what came of them.",
        ("outcome",),
        [((outcome,), getattr(leases, outcome)) for outcome in outcomes],
    )
    yield counter("lease_prefills_avoided", "Prompts that another process computed.", leases.avoided)
    yield counter("lease_tokens_avoided", "Their tokens that it computed.", leases.avoided_tokens)
