"""Early refresh on a real Valkey server, by a scaled clock: recomputes a time to live, and expiries met.

Processes serve requests for one hot prefix, each from its own copy, whose deadline it knows. Requests draw
whether the prefix is refreshed; who draws it asks for the lease, and, if nobody has refreshed meanwhile,
takes delta to compute and stores all blocks anew. A copy whose deadline has come is looked up again; a block
that is not there then is an expiry that a request met. Prints one JSON object.

Usage: python benchmarks/early_refresh.py [--periods 50] [--scale 20] [--processes 4] [--rate 200] [--beta 1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.queues import Queue
from typing import Any

from kvstrata.cache.keys import KeyChain
from kvstrata.cli.cluster import valkey_servers
from kvstrata.tiers.lease import Lease, lease_of, new_owner
from kvstrata.tiers.refresh import EarlyRefresh
from kvstrata.tiers.tier import Address
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.leases import ValkeyLeases
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.resp import Command
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.settings import ValkeySettings

TTL, DELTA, BLOCKS = 60.0, 1.0, 125
VALUE = bytes(1024)


class FrontEnd:
    """One process' view of the prefix. scale: how much quicker than the clock time passes."""

    def __init__(self, url: str, number: int, scale: float, beta: float) -> None:
        self.scale = scale
        self.early = EarlyRefresh(beta, seed=number, clock=time.monotonic)
        self.servers = Servers(ValkeySettings.from_url(parse_tier_url(url)))
        chain = KeyChain(bytes(32), 16)
        chain.extend(range(16 * BLOCKS))
        self.names = Names("refresh", bytes(32))
        self.keys = [self.names.block(Address(key, 0), chain.segment(0)) for key in chain.keys]
        self.segment = chain.segment(0)
        self.leases = ValkeyLeases(self.servers, self.names)
        self.lease: Lease = lease_of(chain, 0, 16, new_owner())
        self.deadline = 0.0
        self.recomputes = self.expired = self.avoided = self.requests = 0

    def run(self, begin: float, end: float, interval: float) -> None:
        """Serve requests at even distances."""
        due = begin
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            self.request()
            due += interval

    def request(self) -> None:
        self.requests += 1
        now = time.monotonic()
        if self.deadline <= now:
            self.deadline = self.look()
            if self.deadline <= now:
                self.expired += 1
                self.refresh()
                return
        if self.early.due(self.deadline, DELTA / self.scale):
            self.refresh()

    def look(self) -> float:
        """When the first of the blocks expires, by the server."""
        now = time.monotonic()
        left = self._call([("PTTL", key) for key in self.keys])
        return now + min(int(each) for each in left) / 1e3  # type: ignore[arg-type]

    def refresh(self) -> None:
        [claim] = self.leases.claim([self.lease], 10 * DELTA / self.scale, [()])
        self.deadline = self.look()
        if not claim.won:
            self.avoided += 1
            return
        if self.deadline - time.monotonic() < TTL / self.scale / 2:
            self.recomputes += 1
            time.sleep(DELTA / self.scale)
            life = round(1e3 * TTL / self.scale)
            self._call([("SET", key, VALUE, "PX", life) for key in self.keys])
            self.deadline = time.monotonic() + life / 1e3
        else:
            self.avoided += 1
        self.leases.release([self.lease])

    def _call(self, commands: list[Command]) -> list[Any]:
        owner = self.servers.owner(self.segment)
        assert owner is not None
        return self.servers.execute(owner, commands, 5.0)


def serve(
    url: str, number: int, chosen: argparse.Namespace, begin: float, told: Queue[dict[str, int]]
) -> None:
    """One process; tells its counts when it is over."""
    front = FrontEnd(url, number, chosen.scale, chosen.beta)
    interval = chosen.processes / chosen.rate / chosen.scale
    end = begin + chosen.periods * TTL / chosen.scale
    if number == 0:
        front.refresh()
        front.recomputes = 0
    front.run(begin + number / chosen.processes * interval, end, interval)
    front.servers.close()
    names = ("requests", "recomputes", "expired", "avoided")
    told.put({name: getattr(front, name) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--periods", type=int, default=50)
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--beta", type=float, default=1.0)
    chosen = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    told: Queue[dict[str, int]] = context.Queue()
    with valkey_servers(1) as [server]:
        url = f"valkey://{server.host}:{server.port}?timeout=5s"
        begin = time.monotonic() + 3.0
        processes = [
            context.Process(target=serve, args=(url, number, chosen, begin, told))
            for number in range(chosen.processes)
        ]
        for process in processes:
            process.start()
        print(f"{chosen.periods * TTL / chosen.scale:.0f} s", file=sys.stderr)
        counts = [told.get() for _ in processes]
        for process in processes:
            process.join()
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    print(json.dumps({"recomputes_per_ttl": total["recomputes"] / chosen.periods, **total}))


if __name__ == "__main__":
    main()
