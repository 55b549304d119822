"""`kvstrata bench capacity`: how many requests run at once in the same KV memory, by KV format.

Blocks and their sizes are all that it depends on: the real scheduler and cache run with the model's layer
groups over a model that computes nothing. A number of requests fits where all run at once to their end,
none preempted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvstrata.cache.layout import BlockLayout, bytes_per_token
from kvstrata.cli.loading import progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import EngineConfig, SamplingParams, parse_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from kvstrata.models.batch import ForwardBatch
    from kvstrata.models.config import DecoderConfig

_VOCAB = 64
_MEMORY = 1 << 30  # bytes
_MOST = 4096  # sequences of a step
_FORMATS = ("bf16", "fp8_e4m3", "int8", "int4")


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("capacity")(with_settings(capacity))


def capacity(
    *,
    configs: list[EngineConfig],
    length: Annotated[int, typer.Option(min=2, help="Tokens of a request, prompt and answer.")] = 2000,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the answer among them.")] = 1000,
    json: JsonFlag = False,
) -> None:
    """Count the requests that fit one KV memory (by default 1 GiB) at once before the first preemption.

    Without --kv-dtype FORMAT,FORMAT: in all formats of 16 bits and less, against bf16.
    """
    if answer >= length:
        raise typer.BadParameter(f"--answer is {answer}; it must be less than --length, {length}")
    if len(configs) == 1:
        configs = [replace(configs[0], kv_dtype=name) for name in _FORMATS]  # type: ignore[arg-type]
    memory = _MEMORY if configs[0].kv_memory == "auto" else parse_bytes(configs[0].kv_memory, "kv_memory")
    runs: dict[str, dict[str, Any]] = {}
    with progress_bar() as bar:
        for config in bar.track(configs, description="counting"):
            runs[config.kv_dtype] = _fitting(config, memory, length, answer)
    first = runs[configs[0].kv_dtype]["requests"]
    for run in runs.values():
        run["times_the_first"] = run["requests"] / first if first else None
    result = {**runs, "kv_memory_bytes": memory, "length": length, "answer": answer}
    if json:
        emit_json(result)
    else:
        _show(runs, memory, length)


class _NoModel:
    """Logits of zero."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        import torch  # noqa: PLC0415  (torch is slow to import)

        return torch.zeros((len(batch.logit_rows), _VOCAB))


def _fitting(config: EngineConfig, memory: int, length: int, answer: int) -> dict[str, Any]:
    from kvstrata.cache.sizing import split_blocks  # noqa: PLC0415  (torch is slow to import)
    from kvstrata.engine.build import block_layouts  # noqa: PLC0415

    layouts = block_layouts(_decoder_config(config), config)
    num_blocks = split_blocks(
        memory,
        layouts,
        max_num_seqs=_MOST,
        max_chunk=config.max_num_batched_tokens,
        max_model_len=length,
    )
    low = max(num_blocks) // -(-length // config.block_size)  # so many by their blocks alone
    step = 1
    while not _fits(layouts, num_blocks, low, length, answer):
        low, step = max(0, low - step), 2 * step
    high, step = low + 1, 1
    while _fits(layouts, num_blocks, high, length, answer):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        if _fits(layouts, num_blocks, middle, length, answer):
            low = middle
        else:
            high = middle
    return {
        "requests": low,
        "bytes_per_token": bytes_per_token(layouts),
        "pool_tokens": max(num_blocks) * config.block_size,
    }


def _decoder_config(config: EngineConfig) -> DecoderConfig:
    from kvstrata.models.locate import locate  # noqa: PLC0415  (torch is slow to import)
    from kvstrata.models.source import open_source  # noqa: PLC0415

    source = open_source(locate(config.model))
    source.close()
    return source.config


def _fits(
    layouts: tuple[BlockLayout, ...], num_blocks: list[int], requests: int, length: int, answer: int
) -> bool:
    from kvstrata.cli.bench.bare_engine import engine_over  # noqa: PLC0415  (torch is slow to import)

    running: list[int] = []
    engine = engine_over(
        layouts,
        num_blocks,
        _NoModel(),
        vocab_size=_VOCAB,
        max_num_seqs=_MOST,
        max_model_len=length,
        on_step=lambda report: running.append(report.running),
    )
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for number in range(requests):
        engine.add_request(str(number), [number % _VOCAB] * (length - answer), params)
    finished = 0
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.result is not None:
                finished += 1
                if delta.result.timings.preemptions:
                    return False
        if finished and max(running) < requests:
            return False  # the last ones wait for the first to end
    return True


def _show(runs: dict[str, dict[str, Any]], memory: int, length: int) -> None:
    table = Table(title=f"Requests of {length:,} tokens at once in {memory / 2**20:,.0f} MiB")
    for column in ("KV", "bytes a token", "pool, tokens", "requests", "times the first"):
        table.add_column(column, justify="left" if column == "KV" else "right")
    for name, run in runs.items():
        ratio = run["times_the_first"]
        table.add_row(
            name,
            f"{run['bytes_per_token']:,}",
            f"{run['pool_tokens']:,}",
            f"{run['requests']:,}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    stdout_console().print(table)
