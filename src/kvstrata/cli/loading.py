"""Loading a model with a progress bar on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstrata.cli.output import stderr_console
from kvstrata.config import EngineConfig

if TYPE_CHECKING:
    from kvstrata.engine.engine import StepReport
    from kvstrata.engine.llm import LLM


def progress_bar() -> Progress:
    """A bar on stderr that vanishes when it is done; silent where stderr is no terminal."""
    console = stderr_console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def load(config: EngineConfig, on_step: Callable[[StepReport], None] | None = None) -> LLM:
    """An LLM, ready; what was loaded, and the pool in tokens, is told on stderr."""
    started = time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("loading", total=None)
        from kvstrata.engine.llm import LLM  # noqa: PLC0415  (torch takes a second: show the bar first)

        llm = LLM(
            config=config,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            on_step=on_step,
        )
    loaded = llm.loaded
    stderr_console().print(
        f"{loaded.path.name} ({loaded.decoder_config.architecture}), "
        f"weights {loaded.weights_bytes / 2**20:,.0f} MiB, "
        f"KV pool {loaded.pool_bytes / 2**20:,.0f} MiB = {loaded.pool_tokens:,} tokens, "
        f"at most {llm.engine.max_model_len:,} a sequence; "
        f"ready after {time.perf_counter() - started:.1f} s",
        style="dim",
        soft_wrap=True,
    )
    return llm
