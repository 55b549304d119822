"""`kvstrata bench spec`: what speculative decoding gains and costs on real prompts, one sequence at a time.

Each figure sets an engine that speculates beside one that does not, in this process, on the same prompts and
in turns; what counts is the time from the first token of an answer to its last. Answers that go round in a
loop are easy to guess and left out.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from kvstrata.cli.bench.spec_figures import Comparison, compare
from kvstrata.cli.bench.spec_prompts import Task, maths, open_ended, repeating
from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import EngineConfig
from kvstrata.errors import ConfigError

_PROMPTS = Path(os.environ.get("KVSTRATA_SHARED", "../shared")) / "data/prompts"
_SELF_TOKENS = 4  # proposed a step by the model to itself


@dataclass(frozen=True)
class _Figure:
    """tasks: reads so many prompts from a folder. settings: of the engine that speculates. weights: of both,
    where not the user's. own_draft: the model's own file is the draft.
    """

    tasks: Callable[[Path, int], list[Task]]
    settings: dict[str, Any]
    weights: Literal["fp32"] | None = None
    own_draft: bool = False


_FIGURES = {
    "ngram_repeat": _Figure(repeating, {"draft": "ngram"}),
    "ngram_open_ended": _Figure(open_ended, {"draft": "ngram"}),
    "ngram_maths": _Figure(maths, {"draft": "ngram"}),
    "self_draft": _Figure(maths, {"draft_tokens": _SELF_TOKENS, "draft_adaptive": False}, own_draft=True),
    "fp32_with_own_file": _Figure(maths, {}, weights="fp32", own_draft=True),
}


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("spec")(with_settings(spec))


def spec(
    *,
    config: EngineConfig,
    prompts: Annotated[
        Path, typer.Option(help="Folder with HumanEval, GSM8K, MT-Bench and tau-bench trajectories.")
    ] = _PROMPTS,
    figure: Annotated[
        list[str] | None, typer.Option(help=f"Only this of {', '.join(_FIGURES)}; several times for several.")
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="Prompts of each set.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 192,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each prompt, of which the best counts.")] = 2,
    json: JsonFlag = False,
) -> None:
    """Measure speculative decoding against none, on prompts that repeat and on others."""
    names = figure or list(_FIGURES)
    for name in names:
        if name not in _FIGURES:
            raise ConfigError(f"--figure is {name!r}; choose from {', '.join(_FIGURES)}")
    plain_config = replace(config, draft=None, draft_model=None)
    figures: dict[str, Any] = {}
    for name in names:
        found = _measure(_FIGURES[name], plain_config, prompts, count, max_tokens, repeats)
        figures |= found.figures(name)
    if json:
        emit_json(figures)
        return
    _show(figures, names)


def _measure(  # noqa: PLR0917 (a call of one place)
    figure: _Figure, config: EngineConfig, prompts: Path, count: int, max_tokens: int, repeats: int
) -> Comparison:
    tasks = figure.tasks(prompts, count)
    both: dict[str, Any] = {} if figure.weights is None else {"weights": figure.weights}
    plain = load(replace(config, **both))
    settings = dict(figure.settings)
    if figure.own_draft:
        settings["draft_model"] = str(plain.loaded.path)
    ahead = load(replace(plain.config, **settings))
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=len(tasks))
        result = compare(
            plain, ahead, tasks, max_tokens=max_tokens, repeats=repeats, advance=lambda: bar.advance(task)
        )
    for llm in (plain, ahead):
        llm.close()
    del plain, ahead, llm
    gc.collect()  # the next figure's engines need the memory
    return result


def _show(figures: dict[str, Any], names: list[str]) -> None:
    table = Table(
        *("", "speed-up", "worst prompt", "tokens/s", "without", "accepted", "prompts", "tokens", "loops"),
        title="speculative decoding, one sequence",
    )
    for name in names:
        get = {key: figures[f"{name}_{key}"] for key in ("speedup", "slowest", "tok_s", "plain_tok_s")}
        acceptance = figures[f"{name}_acceptance"]
        table.add_row(
            name,
            *("" if value is None else f"{value:,.2f}" for value in get.values()),
            "" if acceptance is None else f"{acceptance:.1%}",
            *(f"{figures[f'{name}_{key}']:,}" for key in ("prompts", "tokens", "left_out")),
        )
    stdout_console().print(table)
