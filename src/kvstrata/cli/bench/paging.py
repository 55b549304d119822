"""`kvstrata bench paging`: what paging saves over reserving each sequence's longest length.

The same requests in the same KV memory, twice: in blocks of 16 tokens taken as they fill, and in one block of
the longest length for each sequence, as an engine without paging reserves it. Prefix caching is off in both.
The two take turns of a second, so that a machine whose speed drifts is as fast for one as for the other.
"""

from __future__ import annotations

import math
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
    from kvstrata.engine.outputs import RequestOutput

_RESERVATIONS = 4  # how many longest sequences the memory holds
_TURN = 1.0  # seconds


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
    runs = {name: _Run(replace(mode, kv_memory=memory), lengths) for name, mode in modes.items()}
    _take_turns(runs)
    figures = {name: run.figures() for name, run in runs.items()}
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


class _Run:
    """One of the two engines with all its requests, stepped turn by turn."""

    def __init__(self, config: EngineConfig, lengths: list[Lengths]) -> None:
        self._meter = _Meter()
        self._config = config
        llm = load(config, on_step=self._note)
        self._engine = llm.engine
        self._prompt_tokens = sum(row.prompt for row in lengths)
        self._results: list[RequestOutput] = []
        self._seconds = 0.0
        self.requests = len(lengths)
        rng = random.Random(0)
        vocab = llm.tokenizer.vocab_size
        prompts = [[rng.randrange(vocab) for _ in range(row.prompt)] for row in lengths]
        self._engine.add_request("first", prompts[0][:8], SamplingParams(temperature=0.0, max_tokens=2))
        self.turn(math.inf)
        self._meter, self._results, self._seconds = _Meter(), [], 0.0
        for number, (row, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            params = SamplingParams(temperature=0.0, max_tokens=row.answer, ignore_eos=True)
            self._engine.add_request(str(number), prompt, params)

    @property
    def finished(self) -> int:
        """Requests that are done."""
        return len(self._results)

    def turn(self, seconds: float) -> None:
        """Step for so long, or until all is done."""
        begin = time.perf_counter()
        while self._engine.has_unfinished and time.perf_counter() - begin < seconds:
            self._results += [delta.result for delta in self._engine.step() if delta.result is not None]
        self._seconds += time.perf_counter() - begin

    def figures(self) -> dict[str, Any]:
        """What came out, and how quickly."""
        meter = self._meter
        answers = sum(result.usage.completion_tokens for result in self._results)
        return {
            "concurrency": meter.sequence_seconds / meter.total_seconds,
            "decode_tok_s": meter.decode_tokens / meter.decode_seconds,
            "total_tok_s": (answers + self._prompt_tokens) / self._seconds,
            "output_tok_s": answers / self._seconds,
            "waste": meter.waste_seconds / meter.total_seconds,
            "preemptions": sum(result.timings.preemptions for result in self._results),
            "seconds": self._seconds,
            "block_size": self._config.block_size,
        }

    def _note(self, report: StepReport) -> None:
        self._meter.add(report, self._engine.cache.stats().waste)


def _take_turns(runs: dict[str, _Run]) -> None:
    with progress_bar() as bar:
        tasks = {name: bar.add_task(name, total=run.requests) for name, run in runs.items()}
        while any(run.finished < run.requests for run in runs.values()):
            for name, run in runs.items():
                run.turn(_TURN)
                bar.update(tasks[name], completed=run.finished)


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
