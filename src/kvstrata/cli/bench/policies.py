"""`kvstrata bench policies`: what each eviction policy hits on a trace, and how much it computes twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.bench.replay import SOON_SECONDS, most_hits, read_trace, replay
from kvstrata.cli.loading import progress_bar
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import POLICIES

_TRACE = Path("../shared/data/traces/mooncake_conversation_trace.jsonl.gz")
_CAPACITIES = (1_000, 5_000, 10_000, 30_000)


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("policies")(policies)


def policies(
    *,
    trace: Annotated[
        Path, typer.Option(help="A Mooncake trace: JSON lines with timestamp and hash_ids, gzip or not.")
    ] = _TRACE,
    capacity: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks that are kept; several times for several.")
    ] = None,
    ttl: Annotated[float, typer.Option(min=1, help="Seconds that blocks live under policy ttl.")] = 600.0,
    json: JsonFlag = False,
) -> None:
    """Replay a trace through the policies that pool and tiers use."""
    figures = measure(trace, capacity or list(_CAPACITIES), ttl)
    if json:
        emit_json(figures)
        return
    _show(figures)


def measure(trace: Path, capacities: list[int], ttl: float) -> dict[str, Any]:
    """Hit ratio and thrash by policy and capacity, beside a cache without limit."""
    arrivals = read_trace(trace)
    hit_ratio: dict[str, dict[str, float]] = {}
    thrash: dict[str, dict[str, float]] = {}
    with progress_bar() as bar:
        task = bar.add_task("policies", total=len(POLICIES) * len(capacities))
        for name in POLICIES:
            for capacity in capacities:
                outcome = replay(arrivals, name, capacity, ttl=ttl if name == "ttl" else None)
                hit_ratio.setdefault(name, {})[str(capacity)] = outcome.hit_ratio
                thrash.setdefault(name, {})[str(capacity)] = outcome.thrash
                bar.advance(task)
    return {
        "trace": trace.name,
        "requests": len(arrivals),
        "blocks": sum(len(arrival.keys) for arrival in arrivals),
        "unbounded_hit_ratio": most_hits(arrivals),
        "hit_ratio": hit_ratio,
        "thrash": thrash,
        "thrash_within_s": SOON_SECONDS,
        "ttl_s": ttl,
    }


def _show(figures: Mapping[str, Any]) -> None:
    table = Table(
        "blocks kept",
        title=f"hit ratio (thrash) on {figures['trace']}; without limit {figures['unbounded_hit_ratio']:.1%}",
    )
    for name in figures["hit_ratio"]:
        table.add_column(name, justify="right")
    for capacity in next(iter(figures["hit_ratio"].values())):
        table.add_row(
            f"{int(capacity):,}",
            *(
                f"{ratios[capacity]:.1%} ({figures['thrash'][name][capacity]:.1%})"
                for name, ratios in figures["hit_ratio"].items()
            ),
        )
    stdout_console().print(table)
