"""The picture of `kvstrata bench phases`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstrata.cli.picture import COLOURS, figure_module

_WITH, _WITHOUT, _GREY = COLOURS[0], COLOURS[1], "#666666"


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Write the picture: milliseconds of a step over the context, and shares of the machine's limits."""
    contexts = [int(context) for context in figures["context"]]
    rows = list(figures["context"].values())
    figure = figure_module().Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(
        f"What a token costs: {figures['model']}, {figures['weights']} weights, {figures['threads']} threads"
    )
    times, shares = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_times(times, contexts, rows)
    _draw_shares(shares, contexts, rows, figures)
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.set_xlabel("context (tokens before the step)")
        axes.grid(visible=True, color="#e0e0e0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _draw_times(axes: Any, contexts: list[int], rows: list[Mapping[str, float]]) -> None:
    with_cache = [row["with_cache_ms"] for row in rows]
    without = [row["without_cache_ms"] for row in rows]
    axes.plot(contexts, without, "o-", color=_WITHOUT, label="without the cache: all tokens again")
    axes.plot(contexts, with_cache, "o-", color=_WITH, label="with the cache: one token")
    for place in dict.fromkeys((0, len(rows) - 1)):
        middle = (with_cache[place] * without[place]) ** 0.5
        axes.plot([contexts[place]] * 2, [with_cache[place], without[place]], ":", color=_GREY, zorder=0)
        axes.annotate(
            f"{rows[place]['ratio']:,.0f} x",
            (contexts[place], middle),
            xytext=(6 if place == 0 else -6, 0),
            textcoords="offset points",
            ha="left" if place == 0 else "right",
            va="center",
            color=_GREY,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_ylabel("time for the next token (ms)")
    axes.set_title("One step, with the cache and without it", fontsize=11)
    axes.legend(frameon=False, loc="upper left")


def _draw_shares(
    axes: Any, contexts: list[int], rows: list[Mapping[str, float]], figures: Mapping[str, Any]
) -> None:
    for phase, colour in (("prefill", _WITHOUT), ("decode", _WITH)):
        for limit, style in (("product", "o-"), ("bandwidth", "s--")):
            name = "multiply peak" if limit == "product" else "read bandwidth"
            values = [100 * row[f"{phase}_{limit}_share"] for row in rows]
            axes.plot(contexts, values, style, color=colour, label=f"{phase}, of {name}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of the machine's limit (%)")
    axes.set_title(
        f"What bounds it: {figures['product_gop_s']:,.0f} GOP/s {figures['product_kind']}, "
        f"{figures['read_gb_s']:.1f} GB/s",
        fontsize=11,
    )
    axes.legend(frameon=False, fontsize=9)
