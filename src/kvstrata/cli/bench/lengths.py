"""Lengths of requests: from a trace of real ones, or drawn like them."""

from __future__ import annotations

import csv
import gzip
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstrata.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Prompt and answer."""
        return self.prompt + self.answer


def read_trace(
    path: Path, parse: Callable[[dict[str, str]], T], wrong: str, most: int | None = None
) -> list[T]:
    """What `parse` makes of the first `most` rows of a CSV file, gzipped or not (None: of all).

    wrong: what to say of a file that cannot be read so. Raises ConfigError.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = [parse(row) for row in itertools.islice(csv.DictReader(file), most)]
    except FileNotFoundError:
        raise ConfigError(f"--trace is {str(path)!r}, which does not exist") from None
    except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
        raise ConfigError(f"--trace is {str(path)!r}, which {wrong} ({error})") from error
    if not rows:
        raise ConfigError(f"--trace is {str(path)!r}, which has no requests")
    return rows


def azure_lengths(row: dict[str, str]) -> Lengths:
    """The lengths in a row of an Azure LLM inference trace."""
    return Lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def from_azure_trace(path: Path, count: int, longest: int) -> list[Lengths]:
    """`count` requests, evenly spaced over an Azure LLM inference trace, its longest scaled to `longest`.

    path: a CSV file, gzipped or not, with columns ContextTokens and GeneratedTokens. Raises ConfigError.
    """
    rows = read_trace(path, azure_lengths, "is not a CSV of ContextTokens and GeneratedTokens")
    step = max(1, len(rows) // count)
    return _scaled(rows[::step][:count], longest / max(row.total for row in rows))


def drawn(count: int, longest: int, seed: int = 0) -> list[Lengths]:
    """`count` requests with log-normal lengths, most far shorter than the longest, as in chat services."""
    rng = random.Random(seed)
    rows = [
        Lengths(int(rng.lognormvariate(6.4, 1.0)) + 1, int(rng.lognormvariate(4.9, 0.8)) + 1)
        for _ in range(max(count, 1000))
    ]
    return _scaled(rows[:count], longest / max(row.total for row in rows))


def _scaled(rows: Iterable[Lengths], factor: float) -> list[Lengths]:
    return [Lengths(max(1, int(row.prompt * factor)), max(1, int(row.answer * factor))) for row in rows]
