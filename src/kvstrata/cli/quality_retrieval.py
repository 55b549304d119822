"""Values found again among many, under one configuration after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvstrata.cache.layout import bytes_per_token
from kvstrata.cli.loading import load, progress_bar
from kvstrata.cli.output import stderr_console, stdout_console
from kvstrata.config import EngineConfig

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from kvstrata.engine.retrieval import Question

ENOUGH = 0.7  # of the values: what fp32 has to find for the others to be compared with it
_KEYS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 75)


def retrieve(
    configs: Sequence[EngineConfig], path: Path, keys: int | None, prompts: int | None
) -> dict[str, Any]:
    """Share of the questions in `path` that each configuration answers right.

    keys: pairs a question (None: the most of some numbers up to which fp32 answers 70 % and more).
    """
    from kvstrata.engine.retrieval import found, read_questions, spread  # noqa: PLC0415  (torch takes a second)

    questions = read_questions(path)[:prompts]
    if keys is None:
        keys = _most_keys(replace(configs[0], kv_dtype="fp32", retention="full"), questions)
    asked = spread(questions, keys)
    runs = []
    for config in configs:
        llm = load(config)
        with progress_bar() as bar:
            task = bar.add_task(f"asking, KV in {config.kv_dtype}, {config.retention}", total=len(asked))
            right = found(llm, asked, partial(_advance, bar, task))
        layouts = [group.pool.layout for group in llm.engine.cache.groups]
        runs.append(
            {
                "kv_dtype": config.kv_dtype,
                "kv_dtype_skip_layers": list(config.kv_dtype_skip_layers),
                "retention": config.retention,
                "weights": config.weights,
                "right": right,
                "share_right": right / len(asked),
                "bytes_per_token": bytes_per_token(layouts),
            }
        )
    return {"model": llm.loaded.path.name, "keys": keys, "prompts": len(questions), "runs": runs}


def _most_keys(config: EngineConfig, questions: list[Question]) -> int:
    from kvstrata.engine.retrieval import found, spread  # noqa: PLC0415  (torch takes a second)

    llm = load(config)
    available = min(len(question.pairs) for question in questions)
    best = 1
    with progress_bar() as bar:
        for keys in (number for number in _KEYS if number <= available):
            task = bar.add_task(f"fp32 among {keys} keys", total=len(questions))
            share = found(llm, spread(questions, keys), partial(_advance, bar, task)) / len(questions)
            stderr_console().print(f"fp32 finds {share:.0%} of the values among {keys} keys", style="dim")
            if share < ENOUGH:
                break
            best = keys
    return best


def _advance(bar: Progress, task: TaskID, done: int, _: int) -> None:
    bar.update(task, completed=done)


def show_retrieval(figures: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title=f"{figures['model']}, {figures['prompts']} questions among {figures['keys']} keys")
    for column in ("weights", "KV", "retention", "bytes a token", "right", "share"):
        table.add_column(column, justify="right")
    for run in figures["runs"]:
        table.add_row(
            run["weights"],
            run["kv_dtype"],
            run["retention"],
            f"{run['bytes_per_token']:,}",
            f"{run['right']}",
            f"{run['share_right']:.1%}",
        )
    stdout_console().print(table)
