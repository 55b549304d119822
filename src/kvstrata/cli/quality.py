"""`kvstrata quality`: what weights and KV formats cost, in perplexity of a text or values found again.

The text is cut into windows of 1,024 tokens; each token is predicted from those before it in its window. All
runs through the engine, its scheduler and its pool, as a request's prompt does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json
from kvstrata.cli.picture import check_plot
from kvstrata.cli.quality_retrieval import retrieve, show_retrieval
from kvstrata.cli.quality_text import measure, read_text, show
from kvstrata.config import KV_DTYPES, WEIGHT_MODES, EngineConfig


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("quality")(with_settings(quality))


def quality(
    *,
    configs: list[EngineConfig],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to predict; by default a short one of our own.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Take so many tokens of it; by default all.")
    ] = None,
    window: Annotated[
        int, typer.Option(min=0, help="Tokens of a window; 0 takes the text as one sequence.")
    ] = 1024,
    against: Annotated[
        str | None, typer.Option(help="Measure these weights too, fp32 for instance, and give the ratio.")
    ] = None,
    against_kv_dtype: Annotated[
        str | None, typer.Option(help="KV format of that second run; by default the same.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw perplexity against position in the window into this file.")
    ] = None,
    bucket: Annotated[int, typer.Option(min=1, help="Tokens a point of that picture.")] = 1000,
    retrieval: Annotated[
        Path | None,
        typer.Option(help="Instead of a text: JSONL file, or folder of them, of key-value questions."),
    ] = None,
    keys: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs a question; by default as many as fp32 finds 70 % of the values in."),
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Ask so many of the questions.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure how well the model predicts a text (perplexity, lower is better), or finds values in it.

    Give --kv-dtype and --retention several values, with commas between them, for a table.
    """
    _check_choice("--against", against, WEIGHT_MODES)
    _check_choice("--against-kv-dtype", against_kv_dtype, KV_DTYPES)
    if plot is not None:
        check_plot(plot)
    configs = [replace(config, prefix_caching=False) for config in configs]
    if retrieval is not None:
        figures = retrieve(configs, retrieval, keys, prompts)
        emit_json(figures) if json else show_retrieval(figures)
        return
    if against is not None or against_kv_dtype is not None:
        changes: dict[str, Any] = {
            "weights": against or configs[0].weights,
            "kv_dtype": against_kv_dtype or configs[0].kv_dtype,
        }
        configs.append(replace(configs[0], **changes))
    content = read_text(text)
    runs = [measure(config, content, tokens, window, bucket) for config in configs]
    if plot is not None:
        from kvstrata.cli.quality_plot import draw  # noqa: PLC0415  (matplotlib is an extra)

        draw(runs, plot)
    compared = against is not None or against_kv_dtype is not None
    if json:
        emit_json(_result(runs[:-1], runs[-1]) if compared else _result(runs, None))
    else:
        show(runs, runs[-1] if compared else runs[0])


def _result(runs: list[dict[str, Any]], other: dict[str, Any] | None) -> dict[str, Any]:
    """The first run; where there are several, all of them beside it, with ratios to the first."""
    first = runs[0]
    result = dict(first)
    if other is not None:
        result |= {"against": other, "ratio": first["perplexity"] / other["perplexity"]}
    if len(runs) > 1:
        result["runs"] = [run | {"ratio": run["perplexity"] / first["perplexity"]} for run in runs]
    return result


def _check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{option} is {value!r}; choose one of {', '.join(choices)}")
