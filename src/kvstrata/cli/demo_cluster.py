"""`kvstrata demo --cluster`: two engines over three Valkey servers, of which one dies; who computed what."""

from __future__ import annotations

import os
import time
from importlib.resources import files
from typing import Any

from rich.table import Table

from kvstrata.cli.cluster import EngineProcess, engine_processes, valkey_servers
from kvstrata.cli.output import emit_json, stderr_console, stdout_console
from kvstrata.config import EngineConfig

_SERVERS, _ENGINES = 3, 2
_LEAD = 0.3  # seconds before all begin


def run(config: EngineConfig, *, json: bool) -> None:
    """Show two engines that share what they compute, and what the loss of a server costs."""
    told = stderr_console()
    with valkey_servers(_SERVERS) as servers:
        places = ",".join(f"{server.host}:{server.port}" for server in servers)
        told.print(f"{_SERVERS} Valkey servers: {places}", style="dim")
        settings = {
            "model": config.model,
            "weights": config.weights,
            "kv_dtype": config.kv_dtype,
            "block_size": config.block_size,
            "kv_memory": "512MiB" if config.kv_memory == "auto" else config.kv_memory,
            "max_model_len": config.max_model_len or 4096,
            "threads": config.threads or max(1, (os.cpu_count() or 1) // 2),
            "load_mode": "always",
            "tiers": [*config.tiers, f"valkey://{places}?replicas=2"],
        }
        with engine_processes(settings, _ENGINES) as engines:
            told.print(f"{_ENGINES} engines, each in a process of its own, share them", style="dim")
            handbook = files("kvstrata.cli").joinpath("demo_handbook.txt").read_text(encoding="utf-8")
            prompt: list[int] = engines[0].call({"chat": handbook})["token_ids"]
            cold = _ask(engines, prompt)
            for engine in engines:
                engine.call({"forget": True})
            victim = servers[0]
            told.print(f"killing server {victim.host}:{victim.port}", style="dim")
            victim.terminate()
            after = _ask(engines, prompt)
    usable = (len(prompt) - 1) // config.block_size * config.block_size
    result = summary(usable, cold, after)
    if json:
        emit_json(result)
    else:
        _show(result, cold, after)


def summary(prefix: int, cold: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` tells. prefix: tokens that can be shared. cold, after: answers of each process."""
    answers = [answer["token_ids"] for answer in (*cold, *after)]
    return {
        "prefix_tokens": prefix,
        "computed_by_process": [answer["computed_tokens"] for answer in cold],
        "loaded_by_process": [answer["cached_by_source"].get("valkey", 0) for answer in cold],
        "ttft_ms_by_process": [answer["ttft"][0] * 1e3 for answer in cold],
        "survived_node_loss": all(answer["cached_by_source"].get("valkey", 0) > 0 for answer in after),
        "identical": all(answer == answers[0] for answer in answers),
        "loaded_after_loss": [answer["cached_by_source"].get("valkey", 0) for answer in after],
    }


def _ask(engines: list[EngineProcess], prompt: list[int]) -> list[dict[str, Any]]:
    """The same prompt to all engines at the same time."""
    at = time.monotonic() + _LEAD
    for engine in engines:
        engine.send({"ask": [prompt], "at": at})
    return [engine.receive() for engine in engines]


def _show(result: dict[str, Any], cold: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    console = stdout_console()
    console.print(
        f"\nOne cold prompt to both engines at once; {result['prefix_tokens']:,} of its tokens can be shared."
    )
    table = Table("engine", title="who computed what", title_justify="left")
    for heading in ("computed", "loaded", "TTFT", "loaded after a server died", "TTFT then"):
        table.add_column(heading, justify="right")
    for number, (first, second) in enumerate(zip(cold, after, strict=True)):
        table.add_row(
            str(number),
            f"{first['computed_tokens']:,}",
            f"{first['cached_by_source'].get('valkey', 0):,}",
            f"{first['ttft'][0] * 1e3:,.0f} ms",
            f"{second['cached_by_source'].get('valkey', 0):,}",
            f"{second['ttft'][0] * 1e3:,.0f} ms",
        )
    console.print(table)
    same = "the same" if result["identical"] else "NOT the same"
    console.print(
        "\nOne computed, the other waited and loaded; every block is on two servers, so that the loss of one "
        f"costs\nnothing. The answers of both engines, before and after, are {same}."
    )
