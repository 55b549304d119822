"""A cold prompt hits several processes at once: what is computed once, and what without leases is not.

Real Valkey servers and processes, all on this machine: requests of one output token with one cold prefix and
tails of their own, evenly over the processes, begun at the same moment. Measured are one process that has all
the requests to itself (without a tier, and over one), the processes together with leases, and without. Prints
one JSON object; progress goes to stderr.

Usage: python benchmarks/stampede.py [--processes 4] [--requests 32] [--tokens 2000] [--servers 3]
                                     [--rounds 1] [--model M] [--threads T]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from kvstrata.cli.cluster import EngineProcess, command, engine_processes, info, valkey_servers

IDS = range(100, 40_000)
TAIL = 4  # tokens
BLOCK = 16
SOON = 0.5  # seconds before all begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    rng = random.Random(0)
    prefixes = [[rng.choice(IDS) for _ in range(chosen.tokens)] for _ in range(chosen.rounds)]
    tails = [[rng.choice(IDS) for _ in range(TAIL)] for _ in range(chosen.requests)]
    settings = {
        "model": chosen.model,
        "kv_memory": "256MiB",
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
        for kind, (count, tiers) in kinds.items():
            print(kind, file=sys.stderr)
            with engine_processes({**settings, "tiers": list(tiers)}, count) as engines:
                _warm_up(engines)
                for server in servers:
                    command(server, "FLUSHALL")
                runs[kind] = [_measured(engines, servers, prefix, tails) for prefix in prefixes]
    own = chosen.requests * (chosen.tokens % BLOCK + TAIL)
    print(json.dumps(_figures(chosen.tokens // BLOCK * BLOCK, own, runs)))


def _warm_up(engines: list[EngineProcess]) -> None:
    """Everything has been done once: prefill, decode, and a look at the servers."""
    for number, engine in enumerate(engines):
        engine.call({"ask": [[50 + number] * 40]})


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
    alone, shared = typical["alone"], typical["leases"]
    figures = {
        "prefix_tokens": prefix,
        "answers_identical": all(wave["token_ids"] == alone["token_ids"] for wave in typical.values()),
        "prefixes_computed": _prefixes(shared, prefix, own),
        "prefixes_computed_without_leases": _prefixes(typical["no_leases"], prefix, own),
        "wall_vs_alone": shared["wall"] / alone["wall"],
        "wall_vs_alone_over_tier": shared["wall"] / typical["alone_over_tier"]["wall"],
        "slowest_vs_alone": max(shared["ttft"]) / max(alone["ttft"]),
        "wall_without_leases_vs_alone": typical["no_leases"]["wall"] / alone["wall"],
        "runs": typical,
    }
    for wave in typical.values():
        del wave["token_ids"]
    return figures


def _wall(wave: dict[str, Any]) -> float:
    wall: float = wave["wall"]
    return wall


def _prefixes(wave: dict[str, Any], prefix: int, own: int) -> float:
    """How many times the prefix was computed by all together. own: tokens that only one request has."""
    return (sum(wave["computed_tokens"]) - own) / prefix


if __name__ == "__main__":
    main()
