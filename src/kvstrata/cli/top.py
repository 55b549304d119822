"""`kvstrata top`: a running server at a glance, live in the terminal or once for scripts."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.live import Live

from kvstrata.cli import top_samples
from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.cli.remote import DEFAULT_URL, Remote, RemoteError, UrlOption, remote
from kvstrata.cli.top_figures import Figures
from kvstrata.cli.top_view import page, plain
from kvstrata.errors import ConfigError

_QUIT = b"qQ\x03\x04"  # q, and Ctrl-C and Ctrl-D where the terminal hands them on as keys


def register(app: typer.Typer) -> None:
    """Declare the command."""
    app.command("top")(top)


def top(
    url: UrlOption = DEFAULT_URL,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print, and end.")] = False,
    json: JsonFlag = False,
) -> None:
    """Watch a running server: requests, times, rates, hit ratio, evictions, and how full each place is.

    q quits. An API key goes into the environment variable KVSTRATA_API_KEY.
    """
    server = remote(url)
    figures = Figures()
    if json and not once:
        raise ConfigError("--json goes with --once: a live view has no end")
    if not once and not sys.stdout.isatty():
        raise ConfigError("stdout is no terminal; add --once to print the view once")
    read(server, figures)
    if once:
        time.sleep(interval)
        read(server, figures)
        if json:
            emit_json({"url": server.url, **figures.now()})
        else:
            console = stdout_console()
            console.print(page(server.url, figures.now(), figures.course, console.width))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(server, figures, interval)


def read(server: Remote, figures: Figures) -> None:
    """Take one reading. Raises RemoteError."""
    cache = server.get_json("/v1/cache")
    try:
        text = server.get("/metrics")
    except RemoteError as error:
        if error.status != 404:
            raise
        text = ""  # a build without metrics: what /v1/cache tells is shown
    figures.add(top_samples.read(text, time.monotonic()), cache)


def _watch(server: Remote, figures: Figures, interval: float) -> None:
    console = stdout_console()
    ascii_only = not console.encoding.lower().startswith("utf")
    trouble = None
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = page(server.url, figures.now(), figures.course, console.width, trouble)
            live.update(plain(view) if ascii_only else view, refresh=True)
            if _quits(keyboard, interval):
                return
            try:
                read(server, figures)
                trouble = None
            except RemoteError as error:
                trouble = str(error)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The terminal's keys one by one, without echo; None where there is no keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios  # noqa: PLC0415  (not everywhere)
    import tty  # noqa: PLC0415

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _quits(keyboard: int | None, seconds: float) -> bool:
    """Wait so long; True as soon as a key asks to quit."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if keyboard is None:
            time.sleep(left)
        elif select.select([keyboard], [], [], left)[0]:
            pressed = os.read(keyboard, 64)
            if not pressed or any(key in _QUIT for key in pressed):
                return True
    return False
