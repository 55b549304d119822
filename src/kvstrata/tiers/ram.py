"""The tier in main memory: `ram://?size=4GiB&policy=lrfu&ttl=12h&quota=1GiB`.

One arena holds the payloads, an index entry each tells what they are. Bytes are copied by numpy, which lets
other threads run meanwhile; the lock is held for index work only, so looking up never waits for a copy.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstrata.cache.policies import ORDERS
from kvstrata.config import parse_bytes
from kvstrata.errors import ConfigError
from kvstrata.tiers.arena import SlotArena
from kvstrata.tiers.ram_index import Entry, RamIndex
from kvstrata.tiers.refresh import prolongs
from kvstrata.tiers.tier import (
    Address,
    DropReason,
    Identity,
    Loaded,
    MissReason,
    Record,
    StoreContext,
    Stored,
    TierUsage,
)
from kvstrata.tiers.url import TierUrl, parse_seconds
from kvstrata.tiers.worker import Worker, completed, stand_by, step_back

T = TypeVar("T")

OPTIONS = ("size", "policy", "ttl", "quota")
DEFAULT_SIZE = 1 << 30
DEFAULT_POLICY = "lrfu"


@dataclass(frozen=True)
class RamOptions:
    """Settings of one RAM tier; see `RamTier` for what they mean."""

    size: int
    policy: str
    ttl: float | None
    quota: int | None

    @classmethod
    def from_url(cls, url: TierUrl) -> RamOptions:
        """The settings in a URL. Raises ConfigError naming the option, its value and what would be right."""
        url.reject_unknown(OPTIONS)
        if url.netloc or url.path.strip("/"):
            raise ConfigError(f"tier {url.text!r} names a place; ram has none: ram://?size=4GiB")
        options = url.options
        policy = options.get("policy", DEFAULT_POLICY)
        if policy not in ORDERS:
            raise ConfigError(f"policy of tier {url.text!r} is {policy!r}; choose one of {', '.join(ORDERS)}")
        return cls(
            size=parse_bytes(options.get("size", DEFAULT_SIZE), f"size of tier {url.text!r}"),
            policy=policy,
            ttl=parse_seconds(options["ttl"], f"ttl of tier {url.text!r}") if "ttl" in options else None,
            quota=parse_bytes(options["quota"], f"quota of tier {url.text!r}")
            if "quota" in options
            else None,
        )


class RamTier:
    """Blocks in an arena of `size` bytes.

    policy: what goes first when room is needed. ttl: most seconds that a block is served (None: as its
    request says). quota: most bytes of one cache salt (None: no limit); the salt's own blocks make room.
    clock: seconds, monotonic. Raises ConfigError for what cannot be used.
    """

    name = "ram"

    def __init__(
        self,
        context: StoreContext,
        size: int,
        *,
        policy: str = DEFAULT_POLICY,
        ttl: float | None = None,
        quota: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = SlotArena(context.payload_bytes, size, "size of tier ram")
        self._payload_bytes = context.payload_bytes
        chained = context.chained or (True,) * len(context.payload_bytes)
        self._index = RamIndex(self._arena, chained, policy, quota)
        self.ttl = math.inf if ttl is None else ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._loads = Worker("kvstrata-ram-load")
        self._stores = Worker("kvstrata-ram-store", step_back)
        self._closed = False
        self._populating = Worker("kvstrata-ram-populate", stand_by)
        self._populating.submit(self._populate)
        self._capacity = self._arena.slots * sum(
            self._arena.stride(group) for group in range(len(context.payload_bytes))
        )
        self._counts = TierUsage()

    @classmethod
    def open(cls, url: TierUrl, context: StoreContext) -> RamTier:
        """The tier that a URL names. Raises ConfigError."""
        given = RamOptions.from_url(url)
        return cls(context, given.size, policy=given.policy, ttl=given.ttl, quota=given.quota)

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> list[bool]:
        """Whether each block is there and has not expired."""
        with self._lock:
            now = self._clock()
            return [self._index.get(address, now) is not None for address in addresses]

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        """Copy blocks to the caller's memory; see `Tier.load`."""
        if self._closed:
            return completed([Loaded("closed")] * len(wanted))
        return _or_closed(self._loads.submit(self._load, wanted, into), [Loaded("closed")] * len(wanted))

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        """Copy blocks into the arena; see `Tier.store`."""
        if self._closed:
            return completed([Stored("closed")] * len(records))
        return _or_closed(self._stores.submit(self._store, records), [Stored("closed")] * len(records))

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        """Note a use."""
        with self._lock:
            self._index.touch(addresses, self._clock())

    def pin(self, addresses: Sequence[Address], deadline: float) -> list[bool]:
        """Keep blocks from eviction until `deadline`; false for those not here."""
        with self._lock:
            now = self._clock()
            return [self._index.pin(address, deadline, now) for address in addresses]

    def unpin(self, addresses: Sequence[Address]) -> None:
        """Undo `pin`."""
        with self._lock:
            now = self._clock()
            for address in addresses:
                self._index.unpin(address, now)

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> int:
        """Remove blocks; one that is being read keeps its memory until it was read."""
        with self._lock:
            return sum(self._index.remove(address, "deleted") for address in addresses)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._index.clear()

    def probe(self) -> list[tuple[int, float]]:
        """Copies of one block, from memory to memory: the arena is empty when it is opened."""
        nbytes = max(self._payload_bytes)
        source, target = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
        begin = time.perf_counter()
        np.copyto(target, source)
        return [(nbytes, time.perf_counter() - begin)]

    def usage(self) -> TierUsage:
        """Figures at this moment."""
        with self._lock:
            counts = self._counts
            return TierUsage(
                used_bytes=self._index.used_bytes,
                capacity_bytes=self._capacity,
                records=len(self._index),
                stores=counts.stores,
                loads=counts.loads,
                stored_bytes=counts.stored_bytes,
                loaded_bytes=counts.loaded_bytes,
                store_seconds=counts.store_seconds,
                load_seconds=counts.load_seconds,
                evictions=Counter(self._index.evictions),
                misses=counts.misses.copy(),
                drops=counts.drops.copy(),
                policy=self._index.policy_name,
            )

    def drain(self) -> None:
        """Return when what was handed over before is done."""
        if not self._closed:
            for worker in (self._stores, self._loads):
                _or_closed(worker.submit(lambda: None), None).result()

    def close(self) -> None:
        """Finish what is under way and forget all."""
        self._closed = True
        self._stores.close()
        self._loads.close()
        self._populating.close(0)  # not waited for: it may get no processor for long
        self.clear()

    def _populate(self) -> None:
        """Take the arena's memory from the system before stores need it, while there is time."""
        for _ in self._arena.populate():
            if self._closed:
                return

    def _load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> list[Loaded]:
        begin = time.perf_counter()
        with self._lock:
            now = self._clock()
            found = [self._verified(identity, now) for identity in wanted]
        loaded = 0
        for identity, entry, memory in zip(wanted, found, into, strict=True):
            if isinstance(entry, Entry):
                source = self._arena.view(identity.address.group, entry.slot)
                np.copyto(np.frombuffer(memory, dtype=np.uint8), source)
                loaded += len(source)
        with self._lock:
            outcomes = [
                self._done_reading(identity, entry) for identity, entry in zip(wanted, found, strict=True)
            ]
            self._counts.loads += sum(isinstance(entry, Entry) for entry in found)
            self._counts.loaded_bytes += loaded
            self._counts.load_seconds += time.perf_counter() - begin
        return outcomes

    def _verified(self, identity: Identity, now: float) -> Entry | MissReason:
        """The entry of a block, held for reading, or why there is none."""
        entry = self._index.get(identity.address, None)
        if entry is None:
            return "absent"
        if entry.meta.deadline <= now:
            self._index.remove(identity.address, "expired")
            return "expired"
        if entry.parent != identity.parent:
            return "parent"
        if (entry.token_ids, entry.extras) != (identity.token_ids, identity.extras):
            return "content"
        self._index.begin_reading(entry)
        return entry

    def _done_reading(self, identity: Identity, entry: Entry | MissReason) -> Loaded:
        if not isinstance(entry, Entry):
            self._counts.misses[entry] += 1
            return Loaded(entry)
        self._index.end_reading(identity.address, entry, self._clock())
        return Loaded(None, entry.meta.deadline, entry.meta)

    def _store(self, records: Sequence[Record]) -> list[Stored]:
        """Find slots for all under the lock, copy without it, and enter them under it again.

        The slots are in no index meanwhile: nobody sees one half written.
        """
        begin = time.perf_counter()
        with self._lock:
            now = self._clock()
            outcomes, slots = self._place(records, now)
        placed = [(r, slot) for r, slot in zip(records, slots, strict=True) if slot is not None]
        for record, slot in placed:
            source = np.frombuffer(record.payload, dtype=np.uint8)
            np.copyto(self._arena.view(record.identity.address.group, slot), source)
        with self._lock:
            for record, slot in reversed(placed):  # policies need not weigh one whose child they know
                deadline = self._deadline(record, now)
                self._index.insert(
                    record.identity.address, Entry(slot, record.identity, record.meta, deadline), now
                )
                self._counts.stored_bytes += record.payload.nbytes
            self._counts.stores += len(placed)
            self._counts.store_seconds += time.perf_counter() - begin
        return outcomes

    def _place(self, records: Sequence[Record], now: float) -> tuple[list[Stored], list[int | None]]:
        """Outcomes, and a slot for each record that is new and has room."""
        outcomes = [Stored()] * len(records)
        slots: list[int | None] = [None] * len(records)
        new: list[int] = []
        planned: Counter[str] = Counter()
        seen: set[Address] = set()
        for number, record in enumerate(records):
            identity = record.identity
            address = identity.address
            if record.payload.nbytes != self._payload_bytes[address.group]:
                outcomes[number] = self._dropped("too_big")
            elif address not in seen and not self._is_here(record, now):
                seen.add(address)
                if self._index.fits_quota(identity.extras, address.group, planned, now):
                    new.append(number)
                else:
                    outcomes[number] = self._dropped("quota")
        wanted = Counter(records[number].identity.address.group for number in new)
        for group, count in wanted.items():
            self._index.make_room(group, count, now)
        for number in new:
            slots[number] = self._arena.take(records[number].identity.address.group)
            if slots[number] is None:
                outcomes[number] = self._dropped("full")
        return outcomes, slots

    def _is_here(self, record: Record, now: float) -> bool:
        """Whether the block is kept already: then it was used, and lives longer where that is worth it.

        Other content under its address goes.
        """
        address = record.identity.address
        known = self._index.get(address, now)
        if known is None:
            return False
        if known.holds(record.identity):
            self._index.touch([address], now)
            deadline = self._deadline(record, now)
            if prolongs(known.meta.deadline, deadline, now):
                self._index.prolong(address, deadline, now)
            return True
        self._index.remove(address, "quarantined")
        return False

    def _deadline(self, record: Record, now: float) -> float:
        return min(record.meta.deadline, now + self.ttl * (1 - record.meta.spread))

    def _dropped(self, reason: DropReason) -> Stored:
        self._counts.drops[reason] += 1
        return Stored(reason)


def _or_closed(future: Future[T], instead: T) -> Future[T]:
    """What a worker that was just closed would have done."""
    return completed(instead) if future.cancelled() else future
