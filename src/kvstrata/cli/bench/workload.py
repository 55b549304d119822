"""`kvstrata bench workload`: prefill, cached time to first token, decode, as one engine among others.

The work: random token ids, greedy answers, end tokens ignored. Prefill of 1,024 and of 4,000 tokens; the time
to the first token with 1,008 of 1,024 tokens cached; decode of 64 tokens at 1, 8 and 32 sequences of 128 tokens,
and of 32 at 4,000 tokens of context. Decode rates are the difference of a long and a one-token run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import EngineConfig, SamplingParams

_IDS = range(100, 40_000)  # ids that are ordinary tokens in every model compared
_PROMPT, _ANSWER = 128, 64

Generate = Callable[[list[list[int]], int], None]


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("workload")(with_settings(workload))


def workload(
    *,
    config: EngineConfig,
    sequences: Annotated[
        list[int] | None,
        typer.Option(help="Decode so many sequences; can be given several times [1, 8, 32]."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure prefill, cached prompts and decode through the public API."""
    llm = load(config)

    def generate(prompts: list[list[int]], max_tokens: int) -> None:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

    figures = {"engine": "kvstrata", **measure(generate, sequences or [1, 8, 32])}
    if json:
        emit_json(figures)
        return
    table = Table("figure", "value", title="workload")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else str(value))
    stdout_console().print(table)


def measure(generate: Generate, batches: list[int]) -> dict[str, Any]:
    """Run the work on `generate(prompts, max_tokens)` and return the figures, with a bar on stderr."""
    rng = random.Random(0)
    with progress_bar() as bar:
        task = bar.add_task("workload", total=3 + 2 * len(batches))

        def ids(count: int) -> list[int]:
            return [rng.choice(_IDS) for _ in range(count)]

        def seconds(prompts: list[list[int]], max_tokens: int) -> float:
            start = time.perf_counter()
            generate(prompts, max_tokens)
            return time.perf_counter() - start

        seconds([ids(64)], 8)  # warm-up
        shared = ids(1008)
        cold = seconds([shared + ids(16)], 1)
        bar.advance(task)
        warm = min(seconds([shared + ids(16)], 1) for _ in range(3))
        bar.advance(task)
        figures: dict[str, Any] = {
            "prefill_1024_tok_s": 1024 / cold,
            "ttft_cold_ms": cold * 1e3,
            "ttft_prefix_hit_1008_of_1024_ms": warm * 1e3,
        }
        for count in batches:
            first = median(seconds([ids(_PROMPT) for _ in range(count)], 1) for _ in range(3))
            bar.advance(task)
            whole = median(seconds([ids(_PROMPT) for _ in range(count)], _ANSWER) for _ in range(3))
            bar.advance(task)
            figures[f"decode_bs{count}_tok_s"] = count * (_ANSWER - 1) / max(whole - first, 1e-9)
            figures[f"total_bs{count}_output_tok_s"] = count * _ANSWER / whole
        long = ids(4000)
        first = seconds([long], 1)
        whole = seconds([[*long[:-1], *ids(1)]], 33)
        again = seconds([[*long[:-1], *ids(1)]], 1)
        bar.advance(task)
        figures["prefill_4000_tok_s"] = 4000 / first
        figures["decode_bs1_at_4000_tok_s"] = 32 / max(whole - again, 1e-9)
    return figures
