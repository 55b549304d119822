"""The command line's frame: which commands there are, and how each way of ending is told.

A command lives in a module of its own in this package, with `register(app)`, which declares it. The modules
import torch and the rest of kvstrata inside the command's function, so that `--help` stays quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import kvstrata
from kvstrata.cli.output import open_missing_streams, print_error, silence_stdout
from kvstrata.errors import KVStrataError

# Modules of this package, in the order in which --help shows their commands.
COMMANDS: tuple[str, ...] = ("demo", "generate", "chat", "serve", "size", "quality", "bench", "store", "top")

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def build_app() -> typer.Typer:
    """The application with all commands declared."""
    app = typer.Typer(
        name="kvstrata",
        add_completion=False,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for command in COMMANDS:
        importlib.import_module(f"kvstrata.cli.{command}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 on failure, 2 on wrong usage, 130 when interrupted.

    argv: arguments without the program's name; None takes those of the process. A user's mistake is one line
    on stderr; a traceback appears only with KVSTRATA_DEBUG=1.
    """
    open_missing_streams()
    _spin_briefly()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal's encoding cannot
    try:
        code = build_app()(args=argv, prog_name="kvstrata", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:  # what typer itself refuses: options, arguments, values
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        print_error(error.format_message() + hint)
        return error.exit_code
    except typer.Abort:
        print_error("aborted")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `kvstrata ... | head`
        silence_stdout()
        return EXIT_FAILURE
    except KVStrataError as error:
        return _failed(error, str(error))
    except OSError as error:
        if error.filename is None and error.errno is None:
            return _failed(error, _internal(error))
        if error.filename is None:  # a full disk behind stdout, say
            silence_stdout()
            return _failed(error, f"reading or writing failed: {error.strerror}")
        return _failed(error, f"{error.filename}: {error.strerror}")
    except Exception as error:
        return _failed(error, _internal(error))
    return code if isinstance(code, int) else 0


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", show_default=False)
    ] = False,
) -> None:
    """A KV-cache engine for transformer inference."""
    if version:
        print(f"kvstrata {kvstrata.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)


def _spin_briefly() -> None:
    """Have idle worker threads sleep soon; to be called before torch is imported.

    By default they spin for milliseconds, and where other programs want the cores too, each step then waits
    for threads that are not running. Spinning for a tenth of a millisecond lasts from one kernel to the next.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _internal(error: Exception) -> str:
    return (
        f"internal error ({type(error).__name__}: {error}): please report it with the output of "
        "the same command under KVSTRATA_DEBUG=1"
    )


def _failed(error: Exception, line: str) -> int:
    if os.environ.get("KVSTRATA_DEBUG") == "1":
        raise error
    print_error(line)
    return EXIT_FAILURE
