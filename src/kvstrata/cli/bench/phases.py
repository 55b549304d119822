"""`kvstrata bench phases`: why a KV cache exists.

After n tokens the next one costs a decode step with the cache: one token through the layers, attention over
n. Without it all n tokens are computed again: as much as a prefill of n. Both are measured on the engine,
with each phase's share of the machine's multiply peak and read bandwidth, taken in the same run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.bench.phases_plot import draw
from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stderr_console, stdout_console
from kvstrata.cli.picture import check_plot
from kvstrata.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from kvstrata.engine.engine import StepReport
    from kvstrata.engine.llm import LLM

_CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("phases")(with_settings(phases))


def phases(
    *,
    config: EngineConfig,
    contexts: Annotated[
        list[int] | None,
        typer.Option(
            "--context", min=1, help="Tokens before the step; several times for several [128 ... 4096]."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps at each, of which the best counts.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, of which the best counts.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Write the picture here, as PNG, SVG or PDF.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure a decode step with the cache and without it, over the context."""
    if plot is not None:
        check_plot(plot)
    figures = measure(config, contexts or _CONTEXTS, steps, repeats)
    if plot is not None:
        draw(figures, plot)
        stderr_console().print(f"wrote {plot}", style="dim")
    if json:
        emit_json(figures)
        return
    _show(figures)


class _Meter:
    """Seconds of the prefill steps and of each decode step of one request."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.prefill: list[float] = []
        self.decode: list[float] = []

    def add(self, report: StepReport) -> None:
        (self.prefill if report.prefill_tokens else self.decode).append(report.seconds)


def measure(
    config: EngineConfig, contexts: tuple[int, ...] | list[int], steps: int, repeats: int
) -> dict[str, Any]:
    """Figures by context under `context`, beside the limits that the shares are of."""
    meter = _Meter()
    llm = load(replace(config, prefix_caching=False, max_num_seqs=1), on_step=meter.add)
    from kvstrata.cli.bench.phases_figures import Limits, Spent, Work, row  # noqa: PLC0415  (torch takes a second)

    limits = Limits.measure(config.weights)
    work = Work.of(llm)
    with progress_bar() as bar:
        spent = [
            Spent(context, *_best(llm, meter, context, steps, repeats))
            for context in bar.track(contexts, description="phases")
        ]
    limits = limits.or_better(Limits.measure(config.weights))
    figures = {str(each.context): row(work, limits, each) for each in spent}
    return {"context": figures, **limits.as_json(), "model": llm.loaded.path.name, "weights": config.weights}


def _best(llm: LLM, meter: _Meter, context: int, steps: int, repeats: int) -> tuple[float, float, int]:
    """Seconds of a prefill and of a decode step after it, and the steps that the prefill took."""
    rng = random.Random(context)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    prefill = decode = float("inf")
    chunks = 0
    for _ in range(repeats):
        meter.reset()
        llm.generate([[rng.randrange(llm.tokenizer.vocab_size) for _ in range(context)]], params)
        prefill, decode, chunks = (
            min(prefill, sum(meter.prefill)),
            min(decode, *meter.decode),
            len(meter.prefill),
        )
    return prefill, decode, chunks


def _show(figures: Mapping[str, Any]) -> None:
    table = Table(
        "tokens before",
        title=f"a step with the cache and without it ({figures['model']}, {figures['weights']} weights)",
    )
    for column in (
        "with, ms",
        "without, ms",
        "without / with",
        "decode: read",
        "multiply",
        "prefill: read",
        "multiply",
    ):
        table.add_column(column, justify="right")
    for context, row in figures["context"].items():
        table.add_row(
            f"{int(context):,}",
            f"{row['with_cache_ms']:.1f}",
            f"{row['without_cache_ms']:,.1f}",
            f"{row['ratio']:,.0f} x",
            f"{row['decode_bandwidth_share']:.0%}",
            f"{row['decode_product_share']:.1%}",
            f"{row['prefill_bandwidth_share']:.1%}",
            f"{row['prefill_product_share']:.0%}",
        )
    stdout_console().print(table)
