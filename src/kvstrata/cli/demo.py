"""`kvstrata demo`: a short tour on the default model; what a prefix cache saves, seen on a long prompt."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli import demo_cluster
from kvstrata.cli.generate import DEFAULT_SYSTEM, opening
from kvstrata.cli.loading import load
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM
    from kvstrata.engine.outputs import RequestOutput

_CAPITAL = "What is the capital of France?"
_QUESTIONS = (
    "How many berths does the harbour have?",
    "What is the name of the cat in the office?",
    "On which channel do I call in an emergency?",
)
_BAR = 40  # characters


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("demo")(with_settings(demo))


def demo(
    config: EngineConfig,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Two engines share three Valkey servers; one dies."),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show the cache at work: the same long prompt, cold and then warm."""
    if cluster:
        demo_cluster.run(config, json=json)
        return
    llm = load(config)
    greedy = SamplingParams(temperature=0.0, max_tokens=48)
    hello = llm.chat([*opening(llm, DEFAULT_SYSTEM), {"role": "user", "content": _CAPITAL}], greedy)[0]
    handbook = files("kvstrata.cli").joinpath("demo_handbook.txt").read_text(encoding="utf-8")
    runs = [_ask(llm, handbook, question, greedy) for question in _QUESTIONS]
    if json:
        emit_json(
            {
                "answer": hello.outputs[0].text,
                "cold_ttft_ms": runs[0].timings.ttft * 1e3,
                "warm_ttft_ms": min(run.timings.ttft for run in runs[1:]) * 1e3,
                "runs": [_row(q, run) for q, run in zip(_QUESTIONS, runs, strict=True)],
            }
        )
    else:
        _show(llm, hello, runs)


def _ask(llm: LLM, handbook: str, question: str, params: SamplingParams) -> RequestOutput:
    messages = [
        {"role": "system", "content": f"Answer in one short sentence from this text.\n\n{handbook}"},
        {"role": "user", "content": question},
    ]
    return llm.chat(messages, params)[0]


def _row(question: str, run: RequestOutput) -> dict[str, Any]:
    return {
        "question": question,
        "answer": run.outputs[0].text,
        "prompt_tokens": run.usage.prompt_tokens,
        "cached_tokens": run.usage.cached_tokens,
        "ttft_ms": run.timings.ttft * 1e3,
        "decode_tok_s": run.timings.decode_tok_s,
    }


def _show(llm: LLM, hello: RequestOutput, runs: list[RequestOutput]) -> None:
    console = stdout_console()
    console.print(f"\n{_CAPITAL}", style="bold")
    console.print(f"  {hello.outputs[0].text.strip()}\n")
    console.print(
        f"Now three questions about a handbook of {runs[0].usage.prompt_tokens:,} tokens. The first computes "
        "the keys and values of all of them;\nthe others find them in the cache and compute only what is new."
    )
    table = Table("", "question", "answer", title="time to first token (TTFT)", title_justify="left")
    for heading in ("prompt tokens", "from cache", "TTFT"):
        table.add_column(heading, justify="right")
    for number, (question, run) in enumerate(zip(_QUESTIONS, runs, strict=True)):
        table.add_row(
            "cold" if number == 0 else "warm",
            question,
            run.outputs[0].text.strip(),
            f"{run.usage.prompt_tokens:,}",
            f"{run.usage.cached_tokens:,}",
            f"{run.timings.ttft * 1e3:,.0f} ms",
        )
    console.print(table)
    longest = max(run.timings.ttft for run in runs)
    for number, run in enumerate(runs):
        label = "cold" if number == 0 else "warm"
        bar = "█" * max(1, round(_BAR * run.timings.ttft / longest))
        console.print(f"  {label}  {bar} {run.timings.ttft * 1e3:,.0f} ms", style=None if number else "red")
    warm = min(run.timings.ttft for run in runs[1:])
    cached = runs[1].usage.cached_tokens
    per_token = llm.loaded.pool_bytes / llm.loaded.pool_tokens
    console.print(
        f"\nWarm starts {runs[0].timings.ttft / warm:.1f} times sooner: keys and values of {cached:,} tokens "
        f"({cached * per_token / 2**20:.1f} MiB of the pool)\nwere reused instead of computed."
    )
