"""`kvstrata bench load`: what clients of a running server see under load.

Open loop: requests are sent when their time has come, answered or not, as those of many users are. With
`--conversations` instead the turns of conversations on record, one after another: how much of what a cache
without limit would have is cached, and the time to the first token with and without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.bench import conversations as recorded
from kvstrata.cli.bench import load_plan
from kvstrata.cli.bench.load_client import Outcome, ask
from kvstrata.cli.bench.load_figures import Limits, figures
from kvstrata.cli.loading import progress_bar
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.cli.remote import DEFAULT_URL, Remote, RemoteError, UrlOption, remote
from kvstrata.errors import ConfigError

_ANSWER = 4  # tokens of an answer in a replay, whose prompts are what matters


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("load")(load)


def load(
    *,
    url: UrlOption = DEFAULT_URL,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 100,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Arrivals a second [2, or the trace's own].")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="An Azure LLM inference trace (CSV) for times and lengths; else they are drawn."),
    ] = None,
    longest: Annotated[int, typer.Option(min=8, help="Most tokens of a request, about.")] = 1024,
    shared: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 128,
    conversations: Annotated[
        Path | None, typer.Option(help="Replay conversations instead: tau-bench trajectories (JSON).")
    ] = None,
    conversation_count: Annotated[int, typer.Option(min=1, help="How many of them.")] = 20,
    cold: Annotated[
        int, typer.Option(min=1, help="Requests of a replay to time without the cache too, evenly spread.")
    ] = 50,
    model: Annotated[
        str | None, typer.Option(help="The model served, for a replay to count its tokens.")
    ] = None,
    ttft_limit: Annotated[float, typer.Option(min=0, help="Seconds to the first token that are good.")] = 1.0,
    itl_limit: Annotated[float, typer.Option(min=0, help="Mean seconds between tokens that are good.")] = 0.1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Makes what is drawn repeat.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Load a running server, and tell times to the first token, between tokens, and goodput."""
    server = remote(url)
    cache = server.get_json("/v1/cache")
    if conversations is not None:
        result = _replay(
            server,
            cache["block_size"],
            conversations,
            count=conversation_count,
            cold=cold,
            model=model,
            timeout=timeout,
        )
    else:
        if trace is None:
            times = load_plan.arrivals(requests, rate or 2.0, seed)
            lengths = load_plan.drawn_lengths(requests, longest, seed)
        else:
            times, lengths = load_plan.from_trace(trace, requests, longest, rate)
        plan = load_plan.texts(times, lengths, shared, seed)
        with progress_bar() as bar:
            task = bar.add_task("load", total=len(plan))
            outcomes, seconds = asyncio.run(run(server, plan, timeout, lambda: bar.advance(task)))
        limits = Limits(ttft_limit, itl_limit)
        result = {"rate_planned": len(times) / max(times[-1], 1e-9), **figures(outcomes, seconds, limits)}
        if not result["answered"]:
            raise RemoteError(f"none of {len(plan)} requests was answered: {result['errors']}")
    if json:
        emit_json({"url": server.url, **result})
    else:
        _show(result)


async def run(
    server: Remote, plan: Sequence[load_plan.Planned], timeout: float, advance: Callable[[], None]
) -> tuple[list[Outcome], float]:
    """Send every request at its time; what became of each, and the seconds until the last had ended."""
    began = time.perf_counter()

    async def one(planned: load_plan.Planned) -> Outcome:
        await asyncio.sleep(began + planned.at - time.perf_counter())
        late = time.perf_counter() - began - planned.at
        outcome = await ask(server, planned.path, planned.body, timeout)
        outcome.late = late
        advance()
        return outcome

    outcomes = await asyncio.gather(*map(one, plan))
    return outcomes, time.perf_counter() - began


def _replay(
    server: Remote,
    block_size: int,
    path: Path,
    *,
    count: int,
    cold: int,
    model: str | None,
    timeout: float,
) -> dict[str, Any]:
    from kvstrata.models.chat import ChatTemplate  # noqa: PLC0415  (loads torch)
    from kvstrata.models.locate import locate  # noqa: PLC0415
    from kvstrata.models.source import load_tokenizer, open_source  # noqa: PLC0415

    texts = recorded.read_conversations(path, count)
    card = server.get_json("/v1/models")["data"][0]
    file = locate(model)
    source = open_source(file)
    try:
        tokenizer = load_tokenizer(source, file)
    finally:
        source.close()
    template = ChatTemplate(
        tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    longest = card["max_model_len"] - _ANSWER
    with progress_bar() as bar:
        reading = bar.add_task("tokens", total=len(texts))
        turns = []
        for text in texts:
            turns.append(recorded.turns_of(text, template, tokenizer, longest))
            bar.advance(reading)
        total = sum(map(len, turns))
        if not total:
            raise ConfigError(f"--conversations is {str(path)!r}; none of its turns fits {longest} tokens")
        tasks = {
            "cold": bar.add_task("cold", total=min(cold, total)),
            "replay": bar.add_task("replay", total=total),
        }
        return asyncio.run(
            recorded.replay(
                server,
                turns,
                cold=min(cold, total),
                block_size=block_size,
                max_tokens=_ANSWER,
                timeout=timeout,
                advance=lambda name: bar.advance(tasks[name]),
            )
        )


def _show(result: dict[str, Any]) -> None:
    table = Table("figure", "value", title="load")
    times = Table("milliseconds", "mean", "p50", "p90", "p99", "max")
    for name, value in result.items():
        if name.endswith("ttft_ms") or name in ("itl_ms", "e2e_ms"):
            if value is not None:
                times.add_row(name.removesuffix("_ms"), *(f"{each:,.1f}" for each in value.values()))
        elif isinstance(value, dict):
            table.add_row(name, ", ".join(f"{key} {each:g}" for key, each in value.items()) or "none")
        else:
            table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else str(value))
    console = stdout_console()
    console.print(table)
    console.print(times)
