"""Can a model still find one value among many: needle retrieval from key-value pairs in its context.

The task of Liu et al., Lost in the Middle (arXiv 2307.03172, section 3): a JSON object of random keys and
values, and the question for one of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.config import SamplingParams
from kvstrata.engine.llm import LLM
from kvstrata.errors import ConfigError, RequestError

SUFFIXES = (".jsonl", ".jsonl.gz")
# Tokens of an answer: a UUID takes up to 36 where each of its characters is one.
_ANSWER = SamplingParams(temperature=0.0, max_tokens=48, stop=("\n",), ignore_eos=False)


@dataclass(frozen=True)
class Question:
    """pairs: the context. key: which value is asked for."""

    pairs: tuple[tuple[str, str], ...]
    key: str
    value: str

    def cut(self, num_keys: int, place: int) -> Question:
        """The same question among `num_keys` pairs, the one that is asked for at `place` where it can be."""
        at = next(index for index, (key, _) in enumerate(self.pairs) if key == self.key)
        start = min(max(0, at - place), max(0, len(self.pairs) - num_keys))
        return Question(self.pairs[start : start + num_keys], self.key, self.value)

    def prompt(self) -> str:
        """The context and the question, ending where the value is to come."""
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in self.pairs)
        return (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f'JSON data:\n{{{lines}}}\n\nKey: "{self.key}"\nCorresponding value: "'
        )


def read_questions(path: Path) -> list[Question]:
    """The questions in a JSONL file (gzip or not), or in all of a folder's, in the order of their names.

    Each line has `ordered_kv_records`, `key` and `value`. Raises ConfigError naming file and line.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    questions = [question for file in files for question in _read(file)]
    if not questions:
        raise ConfigError(
            f"--retrieval is {str(path)!r}; it holds no question in a {' or '.join(SUFFIXES)} file"
        )
    return questions


def spread(questions: Sequence[Question], num_keys: int) -> list[Question]:
    """The questions among `num_keys` pairs each, what is asked for at another place each time."""
    return [question.cut(num_keys, index % num_keys) for index, question in enumerate(questions)]


def found(llm: LLM, questions: Sequence[Question], progress: Callable[[int, int], None] | None = None) -> int:
    """How many questions the model answers with the right value.

    progress: called with questions answered so far and their total. Raises RequestError where one does not
    fit.
    """
    results = llm.generate([question.prompt() for question in questions], _ANSWER, progress=progress)
    right = 0
    for question, result in zip(questions, results, strict=True):
        if result.error is not None:
            raise RequestError(f"--retrieval: {result.error}")
        right += result.outputs[0].text.strip().startswith(question.value)
    return right


def _read(file: Path) -> list[Question]:
    try:
        opener: Any = gzip.open if file.name.endswith(".gz") else open
        with opener(file, "rt", encoding="utf-8") as lines:
            return [_question(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"--retrieval is {str(file)!r}; it cannot be read: {error}") from None


def _question(file: Path, number: int, line: str) -> Question:
    try:
        fields = json.loads(line)
        pairs = tuple((str(key), str(value)) for key, value in fields["ordered_kv_records"])
        question = Question(pairs, str(fields["key"]), str(fields["value"]))
    except (ValueError, KeyError, TypeError):
        question = None
    if question is None or (question.key, question.value) not in question.pairs:
        raise ConfigError(
            f"--retrieval is {str(file)!r}; line {number} has no ordered_kv_records with its key and value"
        )
    return question
