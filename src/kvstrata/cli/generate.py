"""`kvstrata generate`: text from a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.loading import load
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stderr_console
from kvstrata.config import EngineConfig, SamplingParams
from kvstrata.errors import RequestError

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM
    from kvstrata.engine.outputs import RequestOutput
    from kvstrata.engine.speculation.counts import DraftCounts


# Said to the model where the user says nothing: small models waver without it.
DEFAULT_SYSTEM = "You are a helpful assistant. Answer clearly and briefly."

SystemOption = Annotated[
    str, typer.Option(help="The system message in front of the prompt; '' leaves it to the model's template.")
]


def opening(llm: LLM, system: str) -> list[dict[str, str]]:
    """The messages that a conversation begins with; some templates refuse system messages, so not our own."""
    messages = [{"role": "system", "content": system}] if system else []
    if system == DEFAULT_SYSTEM:
        try:
            llm.loaded.chat_template.render([*messages, {"role": "user", "content": "?"}])
        except RequestError:
            return []
    return messages


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("generate")(with_settings(generate))


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)],
    *,
    config: EngineConfig,
    params: SamplingParams,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")
    ] = False,
    system: SystemOption = DEFAULT_SYSTEM,
    json: JsonFlag = False,
) -> None:
    """Answer one prompt, in the model's chat format where it has one."""
    if raw and system != DEFAULT_SYSTEM:
        raise typer.BadParameter("--system goes with the chat format; leave out --raw")
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = load(config)
    if not raw and llm.loaded.chat_template.available:
        messages = [*opening(llm, system), {"role": "user", "content": text}]
        deltas = llm.stream(messages=messages, sampling_params=params)
    else:
        deltas = llm.stream(text, params)
    result = None
    for delta in deltas:
        if not json:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        result = delta.result or result
    assert result is not None
    if json:
        emit_json(summary(result))
    else:
        sys.stdout.write("\n")
        stderr_console().print(figures(result), style="dim")


def summary(result: RequestOutput) -> dict[str, Any]:
    """What `--json` tells of a finished request."""
    answer = result.outputs[0]
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "ttft_ms": result.timings.ttft * 1e3,
        "queue_ms": result.timings.queue * 1e3,
        "decode_tok_s": result.timings.decode_tok_s,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "cached_by_source": {name: count for name, count in result.usage.cached_by_source.items() if count},
        "loads": [
            {"tier": load.tier, "blocks": load.blocks, "bytes": load.bytes, "ms": load.seconds * 1e3}
            for load in result.timings.loads
        ],
        "recomputed": result.timings.recomputed,
        "speculation": speculation(result.timings.speculation),
    }


def speculation(counts: DraftCounts) -> dict[str, Any]:
    """What was proposed ahead and accepted; acceptance is None where nothing was proposed."""
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "accepted_by_position": counts.accepted_by_position,
        "acceptance": counts.acceptance,
    }


def figures(result: RequestOutput) -> str:
    """One line for people about how a request went."""
    usage, timings = result.usage, result.timings
    loads = "".join(
        f"; {load.bytes / 2**20:.1f} MiB from {load.tier} in {load.seconds * 1e3:.0f} ms"
        for load in timings.loads
    )
    speed = "" if timings.decode_tok_s is None else f", then {timings.decode_tok_s:.1f} tokens/s"
    counts = timings.speculation
    drafts = (
        f" ({counts.accepted_tokens} of {counts.draft_tokens} proposed ones accepted)"
        if counts.draft_tokens
        else ""
    )
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached{loads}; "
        f"first token after {timings.ttft * 1e3:.0f} ms{speed}; "
        f"{usage.completion_tokens} tokens{drafts}, ended by {result.outputs[0].finish_reason}"
    )
