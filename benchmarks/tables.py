"""Run the benchmarks that the docs quote and write their tables into the docs.

Usage: python benchmarks/tables.py [FILE.md ...]      without files: all of docs/ and benchmarks/

A table stands between two marker lines, the first of which names the command that gives it:

    <!-- table: kvstrata bench paging --json -->
    ...
    <!-- end table -->

The command prints one JSON object. Each object in it becomes a row, in one table with those that have a
name in common; the plain values become a table of names and values. Below it stand the machine, the versions
and the date.
"""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(
    r"(?P<head><!-- table: (?P<command>.+?) -->\n)(?P<old>.*?)(?P<tail><!-- end table -->)", re.DOTALL
)


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]]
    files = files or [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
    for file in files:
        text = file.read_text()
        updated = rewrite(text, run)
        if updated != text:
            file.write_text(updated)
            print(f"wrote the tables of {file}")


def rewrite(text: str, measure: Callable[[str], Mapping[str, Any]]) -> str:
    """Replace what stands between each pair of markers by the table that its command gives."""

    def table_for(match: re.Match[str]) -> str:
        result = measure(match["command"])
        return f"{match['head']}\n{render(result)}\n{provenance()}\n\n{match['tail']}"

    return MARKED.sub(table_for, text)


def run(command: str) -> Mapping[str, Any]:
    """The JSON object that one of our own commands prints."""
    program, *arguments = shlex.split(command)
    if program != "kvstrata":
        raise SystemExit(f"error: {command!r}: a table's command must be kvstrata ...")
    print(f"running {command}", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata", *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    result: Mapping[str, Any] = json.loads(done.stdout)
    return result


def render(result: Mapping[str, Any]) -> str:
    """A table for the rows that share a column, one for each such set, and one for the plain values."""
    tables: list[dict[str, Mapping[str, Any]]] = []
    for name, row in rows(result).items():
        for table in tables:
            if any(row.keys() & other.keys() for other in table.values()):
                table[name] = row
                break
        else:
            tables.append({name: row})
    parts = [rows_table(table) for table in tables]
    plain = {name: value for name, value in result.items() if not isinstance(value, Mapping)}
    if plain:
        parts.append(markdown(["figure", "value"], [[name, cell(value)] for name, value in plain.items()]))
    return "\n".join(parts)


def rows_table(table: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each object, a column for each name that one of them has."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    body = [[name, *(cell(row.get(column)) for column in columns)] for name, row in table.items()]
    return markdown(["", *columns], body)


def rows(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The objects within an object by name; of an object of objects, those within."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            inner = rows(value)
            found |= {f"{name} {part}": row for part, row in inner.items()} or {name: value}
    return found


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: Any) -> str:
    """A value as people read it: thousands separated, three significant digits, empty for none."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(cell(item) for item in value)
    return str(value)


def provenance() -> str:
    """What a figure was measured on."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"Measured on {today}: {processor()}, {os.cpu_count()} logical cores, "
        f"Python {platform.python_version()}, torch {version('torch')}, kvstrata {version('kvstrata')}."
    )


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
