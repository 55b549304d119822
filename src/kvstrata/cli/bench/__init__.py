"""`kvstrata bench WHAT`: measurements, one file each."""

from __future__ import annotations

import typer

from kvstrata.cli.bench import paging


def register(app: typer.Typer) -> None:
    """Declare the command and what it can measure."""
    bench = typer.Typer(no_args_is_help=True, help="Measure the engine on this machine.")
    paging.register(bench)
    app.add_typer(bench, name="bench")
