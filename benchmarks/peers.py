"""kvstrata beside other engines on the same work, one after the other in one run.

Each peer is a script that prints one JSON object with the figures of `kvstrata bench workload`. Prints a
Markdown table: each figure of every engine, and kvstrata's against the best peer's. The machine should
be idle; where its speed drifts, engines take turns for several rounds, and each has the best of its figures.

Usage: python benchmarks/peers.py MODEL.gguf [--sequences 1,8,32] [--rounds 1] [NAME=PYTHON:SCRIPT ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

FIGURES = {
    "prefill_1024_tok_s": "prefill of 1,024 tokens, tok/s",
    "prefill_4000_tok_s": "prefill of 4,000 tokens, tok/s",
    "ttft_prefix_hit_1008_of_1024_ms": "TTFT, 1,008 of 1,024 tokens cached, ms",
    "decode_bs1_tok_s": "decode, 1 sequence, tok/s",
    "decode_bs8_tok_s": "decode, 8 sequences, tok/s",
    "decode_bs32_tok_s": "decode, 32 sequences, tok/s",
    "decode_bs1_at_4000_tok_s": "decode, 1 sequence at 4,000 tokens, tok/s",
}
TIMES = {name for name in FIGURES if name.endswith("_ms")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("peers", nargs="*", metavar="NAME=PYTHON:SCRIPT")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    sequences = [flag for n in arguments.sequences.split(",") for flag in ("--sequences", n)]
    ours = [
        sys.executable,
        "-m",
        "kvstrata",
        "bench",
        "workload",
        "--json",
        "--model",
        arguments.model,
        *sequences,
    ]
    engines = {"kvstrata": (ours, Path.cwd())}
    for peer in arguments.peers:
        name, _, command = peer.partition("=")
        python, _, script = command.partition(":")
        path = Path(script).resolve()
        engines[name] = ([python, str(path), str(Path(arguments.model).resolve())], path.parent)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            rounds[name].append(run(name, *engine))
    print(json.dumps(rounds), file=sys.stderr)
    print(table({name: best(figures) for name, figures in rounds.items()}))
    print(f"\n{cpu()}, {os.cpu_count()} cores, {datetime.datetime.now().astimezone().date()}.")


def run(name: str, command: list[str], folder: Path) -> dict[str, Any]:
    """The last line of JSON that an engine's script prints."""
    print(f"running {name}", file=sys.stderr)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"error: {name} failed: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of each figure."""
    return {
        name: (min if name in TIMES else max)(figures[name] for figures in rounds)
        for name in FIGURES
        if all(name in figures for figures in rounds)
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, a row a figure; the last column is above 1 where kvstrata is ahead of the best peer."""
    names = list(results)
    lines = [f"| figure | {' | '.join(names)} | kvstrata / best peer |", "|---" * (len(names) + 2) + "|"]
    for figure, text in FIGURES.items():
        if figure not in results["kvstrata"]:
            continue
        values = [results[name].get(figure) for name in names]
        others = [value for value in values[1:] if value]
        ratio = ""
        if others and values[0]:
            ratio = (
                f"{min(others) / values[0]:.2f} x sooner"
                if figure in TIMES
                else f"{values[0] / max(others):.2f} x"
            )
        shown = ["-" if value is None else f"{value:,.1f}" for value in values]
        lines.append(f"| {text} | {' | '.join(shown)} | {ratio} |")
    return "\n".join(lines)


def cpu() -> str:
    """The processor's name, and which instructions it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return f"{name} ({', '.join(flag for flag in ('avx2', 'avx512f', 'avx512_vnni') if flag in flags)})"


if __name__ == "__main__":
    main()
