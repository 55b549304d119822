"""The Valkey tier: blocks as plain values on ordinary servers, shared by all engines that know them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvstrata.errors import ConfigError
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import (
    Address,
    Identity,
    Loaded,
    Record,
    StoreContext,
    Stored,
    TierUsage,
)
from kvstrata.tiers.url import TierUrl
from kvstrata.tiers.valkey.copying import Copying
from kvstrata.tiers.valkey.errors import ServerError
from kvstrata.tiers.valkey.figures import Survey, server_usages
from kvstrata.tiers.valkey.leases import ValkeyLeases
from kvstrata.tiers.valkey.moves import Moves, own_segment
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.opening import check_servers
from kvstrata.tiers.valkey.scanning import scan
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.settings import Server, ValkeySettings, parse_servers, read_servers
from kvstrata.tiers.valkey.values import Values
from kvstrata.tiers.worker import completed

T = TypeVar("T")

_TOUCH_EVERY = 30.0  # seconds in which a segment's use is told once
_MOST_SEGMENTS = 65536
_CLOSE_SECONDS = 5.0
_MAINTENANCE_SECONDS = 2.0  # for calls that nobody waits for


class ValkeyTier:
    """A `Tier` on Valkey servers; see there for its methods, and `ValkeySettings` for its settings."""

    def __init__(
        self, settings: ValkeySettings, context: StoreContext, *, clocks: Clocks | None = None
    ) -> None:
        """Connect and see that the servers can be used. Raises ConfigError where they cannot."""
        self.settings = settings
        self.names = Names(settings.prefix, context.fingerprint)
        self.servers = Servers(settings, self._back)
        self._block_bytes = max(context.payload_bytes)
        self._values = Values(context, settings, clocks or Clocks())
        count = 2 * settings.connections
        self._loaders = ThreadPoolExecutor(count, "kvstrata-valkey-load")
        # Not behind the engine's threads, as other tiers' stores are: those who follow wait for them.
        self._storers = ThreadPoolExecutor(settings.connections, "kvstrata-valkey-store")
        # Apart from those that hand out the work, which would else wait for each other.
        self._movers = ThreadPoolExecutor(4 * count, "kvstrata-valkey-move")
        self._askers = ThreadPoolExecutor(count, "kvstrata-valkey-ask")
        self._copying = Copying(self._values.due, settings.stall)
        self._moves = Moves(
            self.servers,
            self.names,
            self._values,
            self._copying,
            movers=self._movers,
            askers=self._askers,
        )
        self._survey = Survey(self.servers)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._under_way = 0
        self._totals = TierUsage()
        self._touched: dict[bytes, float] = {}
        self._closed = False
        try:
            check_servers(self.servers)
        except ConfigError:
            self.close()
            raise
        self._survey.start()

    @classmethod
    def open(cls, url: TierUrl, context: StoreContext) -> ValkeyTier:
        """The tier that a `valkey://` URL names. Raises ConfigError."""
        return cls(ValkeySettings.from_url(url), context)

    @property
    def name(self) -> str:
        return "valkey"

    @property
    def leases(self) -> ValkeyLeases | None:
        """Where it is agreed who computes what; None where that is switched off."""
        return ValkeyLeases(self.servers, self.names) if self.settings.lease else None

    @property
    def ttl(self) -> float:
        """Seconds that a block is served at most."""
        return self.settings.ttl

    @property
    def available(self) -> bool:
        """Whether some server is worth asking."""
        return any(node.is_up for node in self.servers.nodes)

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> list[bool]:
        if self._closed or not addresses:
            return [False] * len(addresses)
        return self._moves.lookup(addresses, _placed(addresses, segments), self.settings.timeout)

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        if not self._enter():
            return completed([Loaded("closed")] * len(wanted))
        return self._loaders.submit(self._load, wanted, into)

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        if not self._enter():
            return completed([Stored("closed")] * len(records))
        return self._storers.submit(self._store, records)

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        now = time.monotonic()
        placed = _placed(addresses, segments)
        with self._lock:
            due = {s for s in set(placed) if self._touched.get(s, 0.0) <= now}
            if len(self._touched) > _MOST_SEGMENTS:
                self._touched.clear()
            self._touched |= dict.fromkeys(due, now + _TOUCH_EVERY)
        chosen = [n for n, segment in enumerate(placed) if segment in due]
        if chosen and not self._closed:
            self._moves.touch([addresses[n] for n in chosen], [placed[n] for n in chosen])

    def pin(self, addresses: Sequence[Address], deadline: float) -> list[bool]:
        """None: what servers evict is theirs to say."""
        return [False] * len(addresses)

    def unpin(self, addresses: Sequence[Address]) -> None:
        """Nothing was pinned."""

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> int:
        if self._closed or not addresses:
            return 0
        count = self._moves.delete(addresses, _placed(addresses, segments), _MAINTENANCE_SECONDS)
        with self._lock:
            self._totals.evictions["deleted"] += count
        return count

    def clear(self) -> None:
        for node in self.servers.nodes:
            if self._closed or not node.is_up:
                continue
            try:
                for names in scan(node, self.names.pattern, _MAINTENANCE_SECONDS):
                    node.execute([("UNLINK", *names)], _MAINTENANCE_SECONDS)
            except ServerError:
                pass  # noted by the node: what it still has is verified when it is loaded

    def probe(self) -> list[tuple[int, float]]:
        """A word, and half the time that a block's bytes take there and back, of one server."""
        found: list[tuple[int, float]] = []
        node = next((node for node in self.servers.nodes if node.is_up), None)
        if node is None or self._closed:
            return found
        try:
            for nbytes, ways in ((1, 1), (self._block_bytes, 2)):
                begin = time.perf_counter()
                node.execute([("ECHO", bytes(nbytes))], _MAINTENANCE_SECONDS)
                found.append((nbytes, (time.perf_counter() - begin) / ways))
        except ServerError:
            pass  # noted by the node
        return found

    def usage(self) -> TierUsage:
        with self._lock:
            totals = self._totals
            held = self._survey.held
            return TierUsage(
                used_bytes=held.used_bytes,
                capacity_bytes=held.capacity_bytes,
                records=held.keys,
                stores=totals.stores,
                loads=totals.loads,
                stored_bytes=totals.stored_bytes,
                loaded_bytes=totals.loaded_bytes,
                store_seconds=totals.store_seconds,
                load_seconds=totals.load_seconds,
                evictions=totals.evictions + Counter(space=held.evicted),
                misses=totals.misses.copy(),
                drops=totals.drops.copy(),
                policy=held.policy,
                servers=server_usages(self.servers),
            )

    def drain(self) -> None:
        with self._lock:
            self._idle.wait_for(lambda: not self._under_way)

    def close(self) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
            if not was_closed:
                self._idle.wait_for(lambda: not self._under_way, _CLOSE_SECONDS)
        if was_closed:
            return
        self._survey.close()
        self._copying.close()
        for threads in (self._loaders, self._storers, self._movers, self._askers):
            threads.shutdown(wait=False)
        self.servers.close()

    def set_servers(self, text: str, weights: str | None = None) -> bool:
        """A new membership, as in a URL: `host:port,host:port`; False where it is the one there is.

        Raises ConfigError for what is none, for fewer servers than replicas, and for new servers that cannot
        be used.
        """
        return self._change(parse_servers(text, weights))

    def reread(self) -> bool:
        """Read the file of members again, if there is one; whether they changed. Raises ConfigError."""
        return self.settings.members is not None and self._change(read_servers(self.settings.members))

    @property
    def unrepaired(self) -> int:
        """Values that servers missed while they were away and have not been given yet."""
        return len(self._moves.hints)

    def settle(self, timeout: float) -> bool:
        """Wait until no copy between servers is under way, at most so many seconds."""
        return self._copying.drain(timeout)

    def _change(self, servers: tuple[Server, ...]) -> bool:
        self.settings.check_members(servers)
        known = {node.name for node in self.servers.nodes}
        fresh = [server for server in servers if server.name not in known]
        if fresh:
            trial = Servers(self.settings.with_servers(tuple(fresh)))
            try:
                check_servers(trial)
            finally:
                trial.close()
        return self.servers.change(servers)

    def _back(self, node: object) -> None:
        for each in self.servers.nodes:
            if each is node:
                self._moves.repair(each)

    def _load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> list[Loaded]:
        begin = time.monotonic()
        try:
            outcomes = self._moves.load(wanted, into)
            hits = [number for number, outcome in enumerate(outcomes) if outcome.miss is None]
            with self._lock:
                self._totals.loads += len(hits)
                self._totals.loaded_bytes += sum(len(into[number]) for number in hits)
                self._totals.load_seconds += time.monotonic() - begin
                self._totals.misses.update(o.miss for o in outcomes if o.miss is not None)
            return outcomes
        finally:
            self._leave()

    def _store(self, records: Sequence[Record]) -> list[Stored]:
        begin = time.monotonic()
        try:
            outcomes = self._moves.store(records)
            with self._lock:
                for record, outcome in zip(records, outcomes, strict=True):
                    if outcome.dropped is None:
                        self._totals.stores += 1
                        self._totals.stored_bytes += len(record.payload)
                    else:
                        self._totals.drops[outcome.dropped] += 1
                self._totals.store_seconds += time.monotonic() - begin
            return outcomes
        finally:
            self._leave()

    def _enter(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._under_way += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._idle.notify_all()


def _placed(addresses: Sequence[Address], segments: Sequence[bytes]) -> Sequence[bytes]:
    return segments or [own_segment(address) for address in addresses]
