"""Which blocks a disk tier holds, where, and in what order they go: all in memory, under the store's lock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvstrata.cache.policies import make_policy
from kvstrata.cache.policy import EvictionPolicy, Meta
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.holding import Held, PinEnds
from kvstrata.tiers.tier import Address


@dataclass(slots=True, eq=False)
class Entry:
    """One record. name: see `name_of`. meta: as policies see it. owner: the cache salt it counts for.

    readers: that hold its slot; gone: it left the index while they did. pinned_until: by the monotonic clock.
    """

    name: bytes
    file: SlotFile
    slot: int
    serial: int
    meta: Meta
    owner: str
    used: float
    readers: int = 0
    gone: bool = False
    pinned_until: float = -math.inf


def name_of(key: bytes, group: int) -> bytes:
    """What policies call a block: its key, apart for each group."""
    return key + group.to_bytes(4, "little")


class DiskIndex:
    """Entries by name, one eviction order over all groups, and one more for each salt under a quota."""

    def __init__(self, policy: str, chained: Sequence[bool], *, by_owner: bool) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._policy = make_policy(policy)
        self._chained = chained
        self._by_owner = by_owner
        self._owners: dict[str, EvictionPolicy] = defaultdict(lambda: make_policy(policy))
        self._owner_bytes: dict[str, int] = defaultdict(int)
        self._pins: PinEnds[bytes] = PinEnds()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, address: Address) -> Entry | None:
        return self._entries.get(name_of(address.key, address.group))

    def entries(self) -> list[Entry]:
        """All of them, in no order."""
        return list(self._entries.values())

    def policy_meta(self, key: bytes, meta: Meta) -> tuple[bytes, Meta]:
        """A block's name, and its meta with the parent's: one that is found without that has none."""
        chained = self._chained[meta.group] if meta.group < len(self._chained) else True
        parent = name_of(meta.parent, meta.group) if chained and meta.parent else b""
        return name_of(key, meta.group), replace(meta, parent=parent)

    def add(self, entry: Entry) -> None:
        """Make a record findable; its name is not in the index."""
        self._entries[entry.name] = entry
        self._policy.insert(entry.name, entry.meta, entry.used)
        if self._by_owner:
            self._owners[entry.owner].insert(entry.name, entry.meta, entry.used)
            self._owner_bytes[entry.owner] += entry.file.geometry.slot_bytes

    def drop(self, entry: Entry) -> None:
        """Make it unfindable; its slot is free once nobody reads it."""
        del self._entries[entry.name]
        self._policy.remove(entry.name)
        entry.gone = True
        if self._by_owner:
            self._owners[entry.owner].remove(entry.name)
            self._owner_bytes[entry.owner] -= entry.file.geometry.slot_bytes
            if not self._owner_bytes[entry.owner]:
                del self._owner_bytes[entry.owner], self._owners[entry.owner]

    def touch(self, entries: Iterable[Entry], now: float) -> None:
        """Note a use of those that are still here."""
        for entry in entries:
            if not entry.gone:
                entry.used = now
                self._look_again(entry)

    def hold(self, entry: Entry) -> None:
        """A reader begins: the slot is not reused before `release`."""
        entry.readers += 1

    def release(self, entry: Entry) -> bool:
        """A reader is done; true where the slot is to be freed now."""
        entry.readers -= 1
        if entry.readers == 0 and not entry.gone:
            self._look_again(entry)
        return entry.readers == 0 and entry.gone

    def pin(self, entry: Entry, deadline: float) -> None:
        """Keep it from eviction until a time; a pin is not shortened by another."""
        self._pins.pin(entry.name, entry, deadline)

    def unpin(self, entry: Entry) -> None:
        """Let it be evicted again."""
        entry.pinned_until = -math.inf
        self._look_again(entry)

    def owner_bytes(self, owner: str) -> int:
        """What the records of a salt take."""
        return self._owner_bytes.get(owner, 0)

    def victims(self, n: int, now: float, owner: str | None = None) -> list[Entry]:
        """Up to `n` entries to evict, of one salt or of all, first to go first; they leave the index."""
        self._lapse_pins(now)
        policy = self._policy if owner is None else self._owners[owner]
        chosen = [self._entries[name] for name in policy.victims(n, Held(self._entries.get, now), now)]
        for entry in chosen:
            self.drop(entry)
        return chosen

    def expired(self, now: float) -> list[Entry]:
        """All entries whose deadline has come; they leave the index."""
        due = [self._entries[name] for name in self._policy.expired(now)]
        for entry in due:
            self.drop(entry)
        return due

    def _look_again(self, entry: Entry) -> None:
        """Tell the policies of a use, or that an entry which they found held need not be so any more."""
        self._policy.touch((entry.name,), entry.used)
        if self._by_owner:
            self._owners[entry.owner].touch((entry.name,), entry.used)

    def _lapse_pins(self, now: float) -> None:
        for name in self._pins.lapsed(now):
            entry = self._entries.get(name)
            if entry is not None and entry.pinned_until <= now:
                self._look_again(entry)
