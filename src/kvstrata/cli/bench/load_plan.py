"""Which requests are sent, and when: open loop, so that a slow server does not slow its load down."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvstrata.cli.bench.lengths import Lengths, azure_lengths, read_trace

# Words that are one token, with the space before them, in most vocabularies.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my
now over such our man me even most made after also well did many before must through years where much way
"""


@dataclass(frozen=True)
class Planned:
    """A request: seconds after the start, where it goes, and what it says."""

    at: float
    path: str
    body: dict[str, Any]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times of `count` arrivals at `rate` a second, independent of each other (a Poisson process)."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))


def from_trace(path: Path, count: int, longest: int, rate: float | None) -> tuple[list[float], list[Lengths]]:
    """The first `count` requests of an Azure LLM inference trace: times, and lengths of at most `longest`.

    rate: arrivals a second that the trace's clock is stretched to (None: as it is). Raises ConfigError.
    """
    rows = read_trace(path, _sent, "has no TIMESTAMP, ContextTokens, GeneratedTokens", count)
    times, lengths = [at for at, _ in rows], [each for _, each in rows]
    span = times[-1] - times[0]
    stretch = 1.0 if rate is None or span == 0 else (len(times) / rate) / span
    return [(time - times[0]) * stretch for time in times], [_cut(each, longest) for each in lengths]


def _sent(row: dict[str, str]) -> tuple[float, Lengths]:
    # Seven digits of a second are one more than Python reads.
    return datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), azure_lengths(row)


def _cut(lengths: Lengths, longest: int) -> Lengths:
    """Answers keep at least a quarter of what there is room for."""
    answer = min(lengths.answer, max(longest - lengths.prompt, longest // 4))
    return Lengths(max(1, min(lengths.prompt, longest - answer)), max(1, answer))


def texts(times: Sequence[float], lengths: Sequence[Lengths], shared: int, seed: int) -> list[Planned]:
    """Requests of about those lengths; all prompts begin with the same `shared` words."""
    rng = random.Random(seed)
    words = _WORDS.split()
    front = rng.choices(words, k=shared)
    planned = []
    for at, length in zip(times, lengths, strict=True):
        own = max(1, length.prompt - shared)
        prompt = [*front[: length.prompt - own], *rng.choices(words, k=own)]
        body = {
            "prompt": " ".join(prompt),
            "max_tokens": length.answer,
            "temperature": 0,
            "ignore_eos": True,
        }
        planned.append(Planned(at, "/v1/completions", body))
    return planned


def drawn_lengths(count: int, longest: int, seed: int) -> list[Lengths]:
    """Log-normal lengths, as chat services have: most prompts a few hundred tokens, a few of them long."""
    rng = random.Random(seed)
    drawn = ((int(rng.lognormvariate(5.8, 0.9)), int(rng.lognormvariate(4.2, 0.8))) for _ in range(count))
    return [_cut(Lengths(prompt + 1, answer + 1), longest) for prompt, answer in drawn]
