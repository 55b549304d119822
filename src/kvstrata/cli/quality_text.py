"""Perplexity of a text under one configuration after another."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvstrata.cache.layout import bytes_per_token
from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.output import stderr_console, stdout_console
from kvstrata.config import EngineConfig
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM


def read_text(text: Path | None) -> str:
    """A file's text, or a short one of our own. Raises ConfigError where it is none."""
    if text is None:
        return files("kvstrata.cli").joinpath("demo_handbook.txt").read_text(encoding="utf-8")
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text is {str(text)!r}, which is no UTF-8 text (byte {error.start})") from None


def measure(
    config: EngineConfig, content: str, tokens: int | None, window: int, bucket: int
) -> dict[str, Any]:
    """Perplexity of a text's first tokens, and what the cache took for it.

    peak_cache_bytes: most that the blocks of sequences took at a time. by_position: perplexity of each
    `bucket` tokens of the windows, by the position of their middle.
    """
    listeners: list[Callable[[int], None]] = []
    llm = load(config, lambda step: _tell(listeners, step.prefill_tokens))
    from kvstrata.engine.quality import evaluate, windows  # noqa: PLC0415  (torch takes a second)

    prefix = llm.tokenizer.prefix_ids
    ids = llm.tokenizer.encode(content, add_special_tokens=False)
    pieces = windows(ids[:tokens], window, prefix)
    if window == 0:
        pieces = [_cut(llm, pieces[0])] if pieces else []
    with progress_bar() as bar:
        task = bar.add_task(
            f"predicting, KV in {config.kv_dtype}, {config.retention}", total=sum(map(len, pieces))
        )
        listeners.append(lambda count: bar.advance(task, count))
        result = evaluate(llm, pieces)
    layouts = [group.pool.layout for group in llm.engine.cache.groups]
    return {
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "nll": result.nll,
        "bytes_per_token": bytes_per_token(layouts),
        "peak_cache_bytes": peak_cache_bytes(llm),
        "weights": config.weights,
        "kv_dtype": config.kv_dtype,
        "retention": config.retention,
        "kv_dtype_skip_layers": list(config.kv_dtype_skip_layers),
        "weights_bytes": llm.loaded.weights_bytes,
        "window": window,
        "model": llm.loaded.path.name,
        "by_position": [
            {"position": position, "perplexity": value} for position, value in result.by_position(bucket)
        ],
    }


def _cut(llm: LLM, ids: list[int]) -> list[int]:
    """What one sequence can have of them, with room for the token that it ends on."""
    limits = llm.engine.limits
    longest = limits.longest(limits.retention) - 1
    if longest < len(ids):
        told = f"{limits.retention}: a sequence has at most {longest:,} of the {len(ids):,} tokens"
        stderr_console().print(told, style="dim")
    return ids[:longest]


def _tell(listeners: list[Callable[[int], None]], count: int) -> None:
    for listener in listeners:
        listener(count)


def peak_cache_bytes(llm: LLM) -> int:
    """Most bytes that the blocks of sequences took at a time, group by group."""
    return sum(group.pool.most_held * group.pool.layout.stride_bytes for group in llm.engine.cache.groups)


def show(runs: list[dict[str, Any]], base: dict[str, Any]) -> None:
    """Print a table of runs over the same text; base: the run that ratios are to."""
    first = runs[0]
    whole = f"in windows of {first['window']:,}" if first["window"] else "as one sequence"
    table = Table(title=f"{first['model']}, {first['tokens']:,} tokens {whole}")
    for column in ("weights", "MiB", "KV", "retention", "bytes a token", "peak MiB", "perplexity", "ratio"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run["weights"],
            f"{run['weights_bytes'] / 2**20:,.0f}",
            run["kv_dtype"],
            run["retention"],
            f"{run['bytes_per_token']:,}",
            f"{run['peak_cache_bytes'] / 2**20:,.1f}",
            f"{run['perplexity']:.4f}",
            f"{run['perplexity'] / base['perplexity']:.5f}",
        )
    stdout_console().print(table)
