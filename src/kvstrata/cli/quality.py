"""`kvstrata quality`: perplexity of a text under a weight mode and a KV format.

The text is cut into windows of 1,024 tokens; each token is predicted from those before it in its window. All
runs through the engine, its scheduler and its pool, as a request's prompt does.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import KV_DTYPES, WEIGHT_MODES, EngineConfig
from kvstrata.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("quality")(with_settings(quality))


def quality(
    *,
    config: EngineConfig,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to predict; by default a short one of our own.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Take so many tokens of it; by default all.")
    ] = None,
    window: Annotated[int, typer.Option(min=3, help="Tokens of a window.")] = 1024,
    against: Annotated[
        str | None, typer.Option(help="Measure these weights too, fp32 for instance, and give the ratio.")
    ] = None,
    against_kv_dtype: Annotated[
        str | None, typer.Option(help="KV format of that second run; by default the same.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure how well the model predicts a text: perplexity, lower is better."""
    _check_choice("--against", against, WEIGHT_MODES)
    _check_choice("--against-kv-dtype", against_kv_dtype, KV_DTYPES)
    content = _read(text)
    figures = _measure(config, content, tokens, window)
    if against is not None or against_kv_dtype is not None:
        changes: dict[str, Any] = {
            "weights": against or config.weights,
            "kv_dtype": against_kv_dtype or config.kv_dtype,
        }
        other = replace(config, **changes)
        figures["against"] = _measure(other, content, tokens, window)
        figures["ratio"] = figures["perplexity"] / figures["against"]["perplexity"]
    if json:
        emit_json(figures)
        return
    _show(figures)


def _measure(config: EngineConfig, content: str, tokens: int | None, window: int) -> dict[str, Any]:
    llm = load(replace(config, prefix_caching=False))
    from kvstrata.engine.quality import evaluate, windows  # noqa: PLC0415  (torch takes a second)

    prefix = llm.tokenizer.prefix_ids
    ids = llm.tokenizer.encode(content, add_special_tokens=False)
    pieces = windows(ids[:tokens], window, prefix)
    with progress_bar() as bar:
        task = bar.add_task(f"predicting, {config.weights} weights", total=len(pieces))
        result = evaluate(llm, pieces, progress=lambda done, _: bar.update(task, completed=done))
    layouts = [group.pool.layout for group in llm.engine.cache.groups]
    return {
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "nll": result.nll,
        "bytes_per_token": sum(layout.payload_bytes for layout in layouts) // config.block_size,
        "weights": config.weights,
        "kv_dtype": config.kv_dtype,
        "weights_bytes": llm.loaded.weights_bytes,
        "window": window,
        "model": llm.loaded.path.name,
    }


def _read(text: Path | None) -> str:
    if text is None:
        return files("kvstrata.cli").joinpath("demo_handbook.txt").read_text(encoding="utf-8")
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text is {str(text)!r}, which is no UTF-8 text (byte {error.start})") from None


def _check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{option} is {value!r}; choose one of {', '.join(choices)}")


def _show(figures: dict[str, Any]) -> None:
    table = Table(
        "", title=f"{figures['model']}, {figures['tokens']:,} tokens in windows of {figures['window']:,}"
    )
    for column in ("weights", "MiB", "KV", "bytes a token", "perplexity", "ratio"):
        table.add_column(column, justify="right")
    for name, row in (("", figures), ("against", figures.get("against"))):
        if row is not None:
            table.add_row(
                name,
                row["weights"],
                f"{row['weights_bytes'] / 2**20:,.0f}",
                row["kv_dtype"],
                f"{row['bytes_per_token']:,}",
                f"{row['perplexity']:.4f}",
                f"{row['ratio']:.5f}" if "ratio" in row else "",
            )
    stdout_console().print(table)
