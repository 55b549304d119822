"""Prompts on which speculation is measured, from public sets: what repeats its prompt, and what does not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigError

_CODE, _MATHS, _OPEN = "HumanEval.jsonl.gz", "gsm8k_test.jsonl.gz", "mt_bench_question.jsonl"
_RECORDS = "taubench_gpt-4o-airline_trajectories.json.gz"
_LEAST_PART = 120  # characters of what is to be extracted: shorter answers tell little
_MOST_RECORD = 1500


@dataclass(frozen=True)
class Task:
    """A prompt. chat: it is a user's message. stop: a text that ends the answer, besides the model's own end.

    likely: text about as long as the answer, where that is known.
    """

    text: str
    chat: bool = True
    stop: str | None = None
    likely: str | None = None


def repeating(folder: Path, count: int) -> list[Task]:
    """Half edits of HumanEval's functions, half extractions from tau-bench's tool results."""
    code, records = _edits(folder), _extractions(folder)
    return list(islice(chain.from_iterable(zip(code, records, strict=False)), count))


def open_ended(folder: Path, count: int) -> list[Task]:
    """First questions of MT-Bench."""
    return [Task(row["turns"][0]) for row in _lines(folder / _OPEN)[:count]]


def maths(folder: Path, count: int) -> list[Task]:
    """Questions of GSM8K."""
    return [Task(row["question"]) for row in _lines(folder / _MATHS)[:count]]


def _edits(folder: Path) -> Iterator[Task]:
    for row in _lines(folder / _CODE):
        name, code = row["entry_point"], (row["prompt"] + row["canonical_solution"]).strip()
        ask = f"```python\n{code}\n```\n\nThe same code with {name} renamed to {name}_new:\n\n```python\n"
        yield Task(ask, chat=False, stop="```", likely=code)


def _extractions(folder: Path) -> Iterator[Task]:
    """The longest part of a tool's result is to be given again, word for word."""
    seen: set[str] = set()
    for row in _read(folder / _RECORDS, json.loads):
        for message in row["traj"]:
            text = str(message.get("content") or "")
            found = _longest_part(text) if message["role"] == "tool" and len(text) <= _MOST_RECORD else None
            if found is None or found[1] in seen:
                continue
            what, part = found
            seen.add(part)
            begin = part[: part.index(":") + 1]
            yield Task(
                f"Result: {text}\n\n{what} of this result: {begin}", chat=False, stop="\n", likely=part
            )


def _longest_part(text: str) -> tuple[str, str] | None:
    """What the longest part of a JSON text is called, and its text; None where it has none of some length."""
    try:
        whole = json.loads(text)
    except ValueError:
        return None
    if isinstance(whole, dict) and whole:
        parts = {f'The "{key}"': json.dumps(value) for key, value in whole.items()}
    elif isinstance(whole, list) and whole:
        parts = {"The first entry": json.dumps(whole[0])}
    else:
        return None
    what, part = max(parts.items(), key=lambda item: len(item[1]))
    return (what, part) if len(part) >= _LEAST_PART and ":" in part else None


def _lines(path: Path) -> list[dict[str, Any]]:
    return _read(path, lambda text: [json.loads(line) for line in text.splitlines() if line.strip()])


def _read(path: Path, parse: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        return parse((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode())
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(
            f"--prompts is {str(path.parent)!r}, and {path.name} in it cannot be read ({error}); "
            "give a folder with HumanEval, GSM8K, MT-Bench and tau-bench trajectories"
        ) from None
