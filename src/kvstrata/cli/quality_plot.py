"""The picture of `kvstrata quality`: perplexity against position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstrata.cli.picture import COLOURS, figure_module


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture: a line for each run, one point for each bucket of tokens."""
    figure = figure_module().Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        points = run["by_position"]
        axes.plot(
            [point["position"] for point in points],
            [point["perplexity"] for point in points],
            "o-",
            color=COLOURS[number % len(COLOURS)],
            markersize=3,
            label=name(run, runs),
        )
    values = [point["perplexity"] for run in runs for point in run["by_position"]]
    if max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("perplexity")
    tokens = max(run["tokens"] for run in runs)
    axes.set_title(f"{runs[0]['model']}, {tokens:,} tokens", fontsize=11)
    axes.grid(visible=True, which="both", color="#e0e0e0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def name(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """What sets a run apart from the others."""
    parts = [
        run[key]
        for key in ("weights", "kv_dtype", "retention")
        if len({str(other[key]) for other in runs}) > 1
    ]
    return ", ".join(parts) or run["kv_dtype"]
