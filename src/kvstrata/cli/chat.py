"""`kvstrata chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from kvstrata.cli.generate import DEFAULT_SYSTEM, SystemOption, figures, opening, summary
from kvstrata.cli.loading import load
from kvstrata.cli.options import with_settings
from kvstrata.cli.output import JsonFlag, emit_json, stderr_console
from kvstrata.config import EngineConfig, SamplingParams
from kvstrata.errors import RequestError

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM
    from kvstrata.engine.outputs import RequestOutput

_HELP = "/new starts over, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer."


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("chat")(with_settings(chat))


def chat(
    config: EngineConfig,
    params: SamplingParams,
    system: SystemOption = DEFAULT_SYSTEM,
    json: JsonFlag = False,
) -> None:
    """Talk with the model; each turn finds the turns before it in the cache.

    Where stdin is no terminal, each of its lines is a turn.
    """
    llm = load(config)
    messages = opening(llm, system)
    turns: list[dict[str, Any]] = []
    if sys.stdin.isatty():
        stderr_console().print(_HELP, style="dim")
    for line in _lines():
        if line == "/exit":
            break
        if line == "/new":
            messages = opening(llm, system)
            continue
        messages.append({"role": "user", "content": line})
        try:
            turn = _answer(llm, messages, params, show=not json)
        except RequestError as error:
            messages.pop()
            if json:
                raise
            stderr_console().print(f"{error}; /new starts over", style="red")
            continue
        messages.append({"role": "assistant", "content": turn.text})
        if turn.result is not None:
            turns.append(summary(turn.result))
            if not json:
                stderr_console().print(figures(turn.result), style="dim")
    if json:
        emit_json({"turns": turns})


def _lines() -> Iterator[str]:
    """What the user types, without empty lines, until the end of stdin."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401, PLC0415  (gives input() its history and editing)

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if line:
            yield line


@dataclass
class _Turn:
    """An answer as far as it came; result is None where the user stopped it."""

    text: str = ""
    result: RequestOutput | None = None


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, *, show: bool) -> _Turn:
    turn = _Turn()
    with (
        _interrupts() as interrupted,
        closing(llm.stream(messages=messages, sampling_params=params)) as deltas,
    ):
        for delta in deltas:
            turn.text += delta.text
            turn.result = delta.result
            if show:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            if interrupted.is_set():
                break
    if show:
        sys.stdout.write("\n")
    return turn


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Note Ctrl-C instead of raising in the middle of a step."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
