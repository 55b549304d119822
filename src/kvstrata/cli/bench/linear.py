"""`kvstrata bench linear`: products with packed weights, by rows and weight format.

Few rows read every weight for little work, so their figure is a share of the memory's read bandwidth,
measured in turns with them; many rows multiply, so theirs is operations/s. The shapes are a small decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.errors import ConfigError


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("linear")(linear)


def linear(
    *,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", help="Weight format; several times for several [Q4_1, Q8_0, Q4_0, Q4_K, Q6_K]."
        ),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option("--rows", min=1, help="Rows at once; several times for several [1, 2, 4, 8, 32, 512]."),
    ] = None,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers; all their weights together should exceed the caches.")
    ] = 30,
    vocabulary: Annotated[int, typer.Option(min=0, help="Outputs of the head; 0 leaves it out.")] = 49152,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, of which the best counts.")] = 7,
    json: JsonFlag = False,
) -> None:
    """Measure products with packed weights as tokens/s, GB/s and a share of read bandwidth."""
    from kvstrata.cli.bench.linear_figures import FORMATS, Sizes, measure  # noqa: PLC0415  (torch is slow)

    for kind in formats or ():
        if kind not in FORMATS:
            raise ConfigError(f"--format is {kind!r}; choose one of {', '.join(FORMATS)}")
    figures = measure(formats or FORMATS, rows or (1, 2, 4, 8, 32, 512), Sizes(layers, vocabulary, repeats))
    if json:
        emit_json(figures)
        return
    _show(figures)


def _show(figures: Mapping[str, Any]) -> None:
    title = f"Products with packed weights ({figures['backend']}, {figures['threads']} threads)"
    table = Table("", title=title)
    for column in ("ms", "tokens/s", "GB/s", "of read bandwidth", "GFLOP/s"):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        if isinstance(row, Mapping):
            table.add_row(
                name,
                f"{row['ms']:.2f}",
                f"{row['tok_s']:,.0f}",
                f"{row['gb_s']:.1f}",
                f"{row['bandwidth_share']:.0%}",
                f"{row['gflop_s']:.0f}",
            )
    stdout_console().print(table)
