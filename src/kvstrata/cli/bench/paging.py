"""`kvstrata bench paging`: what paging saves over reserving each sequence's longest length.

The same requests in the same KV memory, twice: in blocks of 16 tokens taken as they fill, and in one block of
the longest length for each sequence, as an engine without paging reserves it. Prefix caching is off in both.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.bench.lengths import Lengths, drawn, from_azure_trace
from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from kvstrata.engine.engine import StepReport

_RESERVATIONS = 4  # how many longest sequences the memory holds


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("paging")(with_settings(paging))


def paging(
    *,
    config: EngineConfig,
    trace: Annotated[
        Path | None, typer.Option(help="An Azure LLM inference trace (CSV); by default lengths are drawn.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 200,
    longest: Annotated[
        int, typer.Option(min=32, help="Tokens of the longest request, and of a reservation.")
    ] = 2048,
    json: JsonFlag = False,
) -> None:
    """Compare blocks of 16 tokens with one reservation a sequence, in the same memory."""
    lengths = drawn(requests, longest) if trace is None else from_azure_trace(trace, requests, longest)
    config = replace(config, prefix_caching=False, max_model_len=longest, policy="lru", ttl=None)
    modes = {"paged": replace(config, block_size=16), "reserved": replace(config, block_size=longest)}
    memory = _reserved_memory(modes["reserved"])
    figures = {name: _measure(name, replace(mode, kv_memory=memory), lengths) for name, mode in modes.items()}
    gain = {
        key: figures["paged"][key] / figures["reserved"][key]
        for key in ("concurrency", "decode_tok_s", "total_tok_s")
    }
    if json:
        emit_json(
            {**figures, "gain": gain, "requests": requests, "longest": longest, "kv_memory_bytes": memory}
        )
    else:
        _show(figures, gain)


def _reserved_memory(config: EngineConfig) -> int:
    from kvstrata.engine.build import block_layouts  # noqa: PLC0415  (torch is slow to import)
    from kvstrata.models.locate import locate  # noqa: PLC0415
    from kvstrata.models.source import open_source  # noqa: PLC0415

    source = open_source(locate(config.model))
    layouts = block_layouts(source.config, config)
    source.close()
    return _RESERVATIONS * sum(layout.stride_bytes for layout in layouts)


@dataclass
class _Meter:
    """Sums over steps. Concurrency is the mean number of sequences a step, weighted by the step's time."""

    total_seconds: float = 0.0
    sequence_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    waste_seconds: float = 0.0

    def add(self, report: StepReport, waste: float) -> None:
        self.total_seconds += report.seconds
        self.sequence_seconds += report.running * report.seconds
        self.waste_seconds += waste * report.seconds
        if not report.prefill_tokens:
            self.decode_seconds += report.seconds
            self.decode_tokens += report.decode_tokens


def _measure(name: str, config: EngineConfig, lengths: list[Lengths]) -> dict[str, Any]:
    meter = _Meter()
    llm = load(config, on_step=lambda report: meter.add(report, llm.engine.cache.stats().waste))
    rng = random.Random(0)
    vocab = llm.tokenizer.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(row.prompt)] for row in lengths]
    params = [SamplingParams(temperature=0.0, max_tokens=row.answer, ignore_eos=True) for row in lengths]
    llm.generate([prompts[0][:8]], SamplingParams(temperature=0.0, max_tokens=2))
    meter.__init__()  # type: ignore[misc]
    with progress_bar() as bar:
        task = bar.add_task(name, total=len(prompts))
        started = time.perf_counter()
        results = llm.generate(prompts, params, progress=lambda done, _: bar.update(task, completed=done))
        seconds = time.perf_counter() - started
    answers = sum(result.usage.completion_tokens for result in results)
    return {
        "concurrency": meter.sequence_seconds / meter.total_seconds,
        "decode_tok_s": meter.decode_tokens / meter.decode_seconds,
        "total_tok_s": (answers + sum(row.prompt for row in lengths)) / seconds,
        "output_tok_s": answers / seconds,
        "waste": meter.waste_seconds / meter.total_seconds,
        "preemptions": sum(result.timings.preemptions for result in results),
        "seconds": seconds,
        "block_size": config.block_size,
    }


def _show(figures: dict[str, dict[str, Any]], gain: dict[str, float]) -> None:
    table = Table("", "paged", "reserved", "paged / reserved", title="paging against reservation")
    for key, text in (
        ("concurrency", "sequences at once, mean"),
        ("decode_tok_s", "decode, tokens/s of decoding"),
        ("total_tok_s", "prompt and answer tokens/s, total"),
        ("waste", "pool allocated but empty, mean"),
    ):
        form = ".1%" if key == "waste" else ",.1f"
        values = [format(figures[mode][key], form) for mode in ("paged", "reserved")]
        table.add_row(text, *values, f"{gain[key]:.2f} x" if key in gain else "")
    stdout_console().print(table)
