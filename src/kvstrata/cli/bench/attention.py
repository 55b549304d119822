"""`kvstrata bench attention`: paged attention against the limits of the machine.

Decode reads every key and value once, so its figure is a share of the memory's read bandwidth; prefill
multiplies, so its figure is a share of what torch's float32 product reaches. Both limits are measured in the
same run, just before and after what is compared with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.cli.bench.attention_figures import Figures


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("attention")(attention)


def attention(
    *,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 9,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 3,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 64,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers whose pools are cycled, so that none stays cached.")
    ] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, of which the best counts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default torch's.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure paged attention as shares of read bandwidth (decode) and of multiply throughput (prefill)."""
    from kvstrata.cli.bench.attention_figures import Shape, measure  # noqa: PLC0415  (torch is slow to import)

    if heads % kv_heads:
        raise ConfigError(f"--heads is {heads}, expected a multiple of --kv-heads ({kv_heads})")
    figures = measure(Shape(heads, kv_heads, head_dim, layers), repeats, threads)
    if json:
        emit_json(figures.as_json())
        return
    _show(figures)


def _show(figures: Figures) -> None:
    table = Table(title=f"Paged attention ({figures.backend}, {figures.threads} threads)")
    for column in ("what", "ms", "reached", "limit", "share"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in figures.rows:
        table.add_row(
            f"{row.phase} {row.dtype} {row.context}",
            f"{row.seconds * 1000:.2f}",
            f"{row.reached:.1f} {row.unit}",
            f"{row.limit:.1f}",
            f"{row.share:.0%}",
        )
    stdout_console().print(table)
