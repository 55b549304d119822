"""`kvstrata bench ring`: how evenly the ring places segments, and what moves when a server comes or goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.tiers.ring import POINTS, Member, Ring


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("ring")(ring)


def ring(
    keys: Annotated[int, typer.Option(min=1000, help="Segments that are placed.")] = 1_000_000,
    json: JsonFlag = False,
) -> None:
    """Place many segments, add a fourth server to three, take it away again, and spread them over ten."""
    figures = measure(keys)
    if json:
        emit_json(figures)
        return
    table = Table("figure", "value", title=f"{keys:,} segments, {POINTS:,} points a server")
    for name, value in figures.items():
        if name not in ("keys", "points"):
            table.add_row(name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value))
    stdout_console().print(table)


def measure(count: int) -> dict[str, Any]:
    """moved_share: of segments, when a fourth server joins three; moved_elsewhere: those of them that went to
    another than the new one. restored: whether the map is as before when it has left. balance: of ten servers
    the fullest against the mean. three_hold: what three servers hold of as many segments as would fill them,
    in units of what one holds.
    """
    names = [number.to_bytes(8, "little") for number in range(count)]
    three = _owners(_members(3), names)
    four = _owners(_members(4), names)
    again = _owners(list(reversed(_members(3))), names)
    new = _members(4)[-1].name
    moved = [(before, after) for before, after in zip(three, four, strict=True) if before != after]
    ten = Counter(_owners(_members(10), names))
    room = count / 3
    return {
        "keys": count,
        "points": POINTS,
        "moved_share": len(moved) / count,
        "moved_elsewhere": sum(after != new for _, after in moved),
        "restored": three == again,
        "balance": max(ten.values()) / (count / 10),
        "three_hold": sum(min(room, held) for held in Counter(three).values()) / room,
    }


def _members(count: int) -> list[Member]:
    return [Member(f"cache-{number}:6379") for number in range(1, count + 1)]


def _owners(members: Sequence[Member], names: Sequence[bytes]) -> list[str | None]:
    placed = Ring(members)
    return [placed.owner(name) for name in names]
