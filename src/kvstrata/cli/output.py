"""What goes to which stream: results to stdout, everything said along the way to stderr.

With `--json` a command's stdout is one JSON object and nothing else; `emit_json` writes it. Otherwise tables
and text for people go through `stdout_console()`. Progress and logs go through `stderr_console()` in both
cases. Rich drops colours and cursor control by itself where the stream is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

PIPE_COLUMNS = 120  # width of tables where no terminal tells one

# The type of every command's `json` parameter: `json: JsonFlag = False`.
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.", show_default=False)
]


def emit_json(result: Mapping[str, Any]) -> None:
    """Write one JSON object as one line on stdout, at once: whoever reads a server's waits for it.

    Infinite and NaN numbers, which JSON does not have, become null. Raises TypeError for values that JSON
    cannot carry.
    """
    sys.stdout.write(json.dumps(_finite(result), allow_nan=False) + "\n")
    sys.stdout.flush()


def stdout_console() -> Console:
    """The console for results that people read."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """The console for progress, warnings and logs."""
    return _console(stderr=True)


def print_error(message: str) -> None:
    """Write `error: message` as one line on stderr."""
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)


def silence_stdout() -> None:
    """Send what is still buffered for a closed pipe to nowhere, so that the interpreter's exit is quiet."""
    with contextlib.suppress(OSError):  # not a file of the system's, as under a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_missing_streams() -> None:
    """Put nothing in the place of standard streams that the process was started without (`>&-`).

    Their numbers would otherwise go to the next files opened, and what is printed into these.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for good)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    # No markup: texts that clients chose, such as cache salts, may look like it.
    return Console(stderr=stderr, width=width, highlight=False, markup=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
