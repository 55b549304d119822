"""A cold prompt hits several processes at once: what is computed once, and what without leases is not.

Real Valkey servers and processes, all on this machine: requests of one output token with one cold prefix and
tails of their own, evenly over the processes, begun at the same moment. Measured are one process that has all
the requests to itself (without a tier, and over one), the processes together with leases, and without. Each
process has used all of its pool before, whose pages are otherwise given to it while time is measured. Prints
one JSON object; progress goes to stderr.

Usage: python benchmarks/stampede.py [--processes 4] [--requests 32] [--tokens 2000] [--servers 3]
                                     [--rounds 1] [--kinds alone,leases] [--kv-memory 80MiB] [--model M]
                                     [--threads T]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any

from kvstrata.cli.cluster import EngineProcess, command, engine_processes, info, valkey_servers

IDS = range(100, 40_000)
TAIL = 4  # tokens
BLOCK = 16
SOON = 0.5  # seconds before all begin
KINDS = ("alone", "alone_over_tier", "leases", "no_leases")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--kv-memory", default="80MiB", help="of each process")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    # As the command line does: threads of several engines that share cores are not to spin for long.
    os.environ["GOMP_SPINCOUNT"] = "2000"
    rng = random.Random(0)
    prefixes = [[rng.choice(IDS) for _ in range(chosen.tokens)] for _ in range(chosen.rounds)]
    tails = [[rng.choice(IDS) for _ in range(TAIL)] for _ in range(chosen.requests)]
    settings = {
        "model": chosen.model,
        "kv_memory": chosen.kv_memory,
        "max_model_len": chosen.tokens + 256,
        "threads": chosen.threads,
        "load_mode": "always",
    }
    runs: dict[str, list[dict[str, Any]]] = {}
    with valkey_servers(chosen.servers) as servers:
        places = ",".join(f"{server.host}:{server.port}" for server in servers)
        kinds = {
            "alone": (1, ()),
            "alone_over_tier": (1, (f"valkey://{places}?lease=off",)),
            "leases": (chosen.processes, (f"valkey://{places}",)),
            "no_leases": (chosen.processes, (f"valkey://{places}?lease=off",)),
        }
        for kind in chosen.kinds:
            count, tiers = kinds[kind]
            print(kind, file=sys.stderr)
            with engine_processes({**settings, "tiers": list(tiers)}, count) as engines:
                _warm_up(engines, chosen.tokens)
                for server in servers:
                    command(server, "FLUSHALL")
                runs[kind] = [_measured(engines, servers, prefix, tails) for prefix in prefixes]
    own = chosen.requests * (chosen.tokens % BLOCK + TAIL)
    print(json.dumps(_figures(chosen.tokens // BLOCK * BLOCK, own, runs)))


def _warm_up(engines: list[EngineProcess], tokens: int) -> None:
    """Everything has been done once: prefill, decode, stores and loads, as often as fills the pool."""
    rng = random.Random(1)
    for engine in engines:
        engine.call({"ask": [[rng.choice(IDS) for _ in range(40)]]})
    prompts = [[rng.choice(IDS) for _ in range(tokens)] for _ in range(-(-engines[0].pool_tokens // tokens))]
    for engine in engines:
        engine.call({"ask": prompts})


def _measured(
    engines: list[EngineProcess], servers: list[Any], prefix: list[int], tails: list[list[int]]
) -> dict[str, Any]:
    """One wave of requests over all processes."""
    before = [_commands(server) for server in servers]
    at = time.monotonic() + SOON
    for number, engine in enumerate(engines):
        engine.send({"ask": [prefix + tail for tail in tails[number :: len(engines)]], "at": at})
    answers = [engine.receive() for engine in engines]
    after = [_commands(server) for server in servers]
    names = sorted({name for each in after for name in each})
    return {
        "wall": max(answer["end"] for answer in answers) - at,
        "ttft": [max(answer["ttft"]) for answer in answers],
        "computed_tokens": [answer["computed_tokens"] for answer in answers],
        "loaded_blocks": [answer["loaded_blocks"] for answer in answers],
        "leases": [answer["leases"] for answer in answers],
        "commands": {
            name: sum(a.get(name, 0) - b.get(name, 0) for a, b in zip(after, before, strict=True))
            for name in names
        },
        "token_ids": sorted(
            (tails.index(tail), ids)
            for number, answer in enumerate(answers)
            for tail, ids in zip(tails[number :: len(engines)], answer["token_ids"], strict=True)
        ),
    }


def _commands(server: Any) -> dict[str, float]:
    return {name: values["calls"] for name, values in info(server, "commandstats").items()}


def _figures(prefix: int, own: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of the median rounds, and what each kind of run came to."""
    typical = {kind: sorted(waves, key=_wall)[len(waves) // 2] for kind, waves in runs.items()}
    figures: dict[str, Any] = {
        "prefix_tokens": prefix,
        "walls": {kind: [round(wave["wall"], 3) for wave in waves] for kind, waves in runs.items()},
        "slowest": {kind: [round(max(wave["ttft"]), 3) for wave in waves] for kind, waves in runs.items()},
        "prefixes_computed": {
            kind: [round((sum(wave["computed_tokens"]) - own) / prefix, 2) for wave in waves]
            for kind, waves in runs.items()
        },
    }
    if alone := typical.get("alone"):
        rounds = zip(*([wave["token_ids"] for wave in waves] for waves in runs.values()), strict=True)
        figures["answers_identical"] = all(ids == answers[0] for answers in rounds for ids in answers)
        figures["wall_vs_alone"] = {kind: wave["wall"] / alone["wall"] for kind, wave in typical.items()}
        figures["slowest_vs_alone"] = {
            kind: max(wave["ttft"]) / max(alone["ttft"]) for kind, wave in typical.items()
        }
    told = {kind: {**wave, "token_ids": None} for kind, wave in typical.items()}
    return {**figures, "runs": told}


def _wall(wave: dict[str, Any]) -> float:
    wall: float = wave["wall"]
    return wall


if __name__ == "__main__":
    main()
