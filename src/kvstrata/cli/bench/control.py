"""`kvstrata bench control`: what bookkeeping costs, in milliseconds.

First a long prompt that is all cached: its keys, the look-up, taking the blocks, growing to the prompt's
end, committing, releasing. Then decode steps of a deep and very thin model, which leave nothing but the
engine's own work. `--vllm-python` has vLLM's KVCacheManager do the same prompt in its own environment.
"""

from __future__ import annotations

import json as json_module
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstrata.cli.output import JsonFlag, emit_json, stdout_console
from kvstrata.errors import ConfigError

_STEPS = 64
_VLLM = Path(__file__).with_name("control_vllm.py")


def register(bench: typer.Typer) -> None:
    """Declare the measurement."""
    bench.command("control")(control)


def control(
    *,
    tokens: Annotated[int, typer.Option(min=17, help="Tokens of the cached prompt.")] = 32_768,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model that decodes.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, of which the best counts.")] = 25,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM, to measure it beside.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure what bookkeeping costs for a cached prompt and in each decode step."""
    from kvstrata.cli.bench.control_figures import cached_prompt, decode_step  # noqa: PLC0415  (torch is slow)

    parts = cached_prompt(tokens, repeats)
    figures: dict[str, Any] = {
        f"total_ms_{tokens}_cached": sum(parts.values()),
        "parts_ms": parts,
        **{f"decode_step_{count}": decode_step(layers, count, _STEPS) for count in (1, 32)},
        "layers": layers,
    }
    if vllm_python is not None:
        figures |= {f"vllm_{name}": value for name, value in _vllm(vllm_python, tokens, repeats).items()}
    if json:
        emit_json(figures)
        return
    _show(figures)


def _vllm(python: Path, tokens: int, repeats: int) -> Mapping[str, Any]:
    command = [str(python), str(_VLLM), str(tokens), str(repeats)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--vllm-python is {str(python)!r}, which does not run ({error.strerror})"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(f"--vllm-python is {str(python)!r}: vLLM's cache did not run there ({reason})")
    result: Mapping[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
    return result


def _show(figures: Mapping[str, Any]) -> None:
    table = Table("what", "ms", title="bookkeeping")
    table.columns[1].justify = "right"
    for name, value in figures.items():
        parts = (
            {f"{name}: {part}": spent for part, spent in value.items()} if isinstance(value, Mapping) else {}
        )
        for title, spent in (parts or {name: value}).items():
            if title != "layers":
                table.add_row(title.replace("_", " "), f"{spent:.3f}")
    stdout_console().print(table)
