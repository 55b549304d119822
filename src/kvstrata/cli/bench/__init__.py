"""`kvstrata bench WHAT`: measurements, one file each."""

from __future__ import annotations

import typer

from kvstrata.cli.bench import (
    attention,
    capacity,
    control,
    linear,
    load,
    paging,
    phases,
    policies,
    ring,
    spec,
    tiers,
    waste,
    workload,
)


def register(app: typer.Typer) -> None:
    """Declare the command and what it can measure."""
    bench = typer.Typer(no_args_is_help=True, help="Measure the engine on this machine.")
    for measurement in (
        workload,
        phases,
        attention,
        linear,
        control,
        paging,
        waste,
        capacity,
        tiers,
        policies,
        ring,
        spec,
        load,
    ):
        measurement.register(bench)
    app.add_typer(bench, name="bench")
