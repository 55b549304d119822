"""What the RAM tier holds: an entry a block, and which goes when room is needed."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from kvstrata.cache.keys import salt_of
from kvstrata.cache.policies import make_policy
from kvstrata.cache.policy import EvictionPolicy, Meta
from kvstrata.tiers.arena import SlotArena
from kvstrata.tiers.tier import Address, Identity

EvictReason = Literal["space", "expired", "quota", "quarantined", "deleted"]


class Entry:
    """One block: where it lies and what it must be compared with. readers: loads that copy it just now."""

    __slots__ = ("extras", "meta", "parent", "pinned_until", "readers", "slot", "token_ids")

    def __init__(self, slot: int, identity: Identity, meta: Meta, deadline: float) -> None:
        self.slot = slot
        self.parent = identity.parent
        self.token_ids = identity.token_ids
        self.extras = identity.extras
        self.meta = meta if meta.deadline == deadline else replace(meta, deadline=deadline)
        self.readers = 0
        self.pinned_until = -math.inf

    def holds(self, identity: Identity) -> bool:
        """Whether it is the content of an identity."""
        return (self.parent, self.token_ids, self.extras) == (
            identity.parent,
            identity.token_ids,
            identity.extras,
        )


class RamIndex:
    """Entries by address, with a policy a group, and one a salt and group where there is a quota.

    Not safe for several threads: its owner has a lock.
    """

    def __init__(self, arena: SlotArena, num_groups: int, policy: str, quota: int | None) -> None:
        self.evictions: Counter[str] = Counter()
        self.used_bytes = 0
        self._arena = arena
        self._entries: dict[Address, Entry] = {}
        self.policy_name = policy
        self._policies = [make_policy(policy) for _ in range(num_groups)]
        self._quota = quota
        self._salted: dict[tuple[str, int], EvictionPolicy] = {}
        self._salt_bytes: Counter[str] = Counter()
        self._pins: list[tuple[float, Address]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, address: Address, now: float | None) -> Entry | None:
        """The entry of an address; with `now`, only if it may still be served then."""
        entry = self._entries.get(address)
        return None if entry is None or (now is not None and entry.meta.deadline <= now) else entry

    def addresses(self) -> list[Address]:
        """What is here."""
        return list(self._entries)

    def insert(self, address: Address, entry: Entry, now: float) -> None:
        """Add a block whose bytes are in its slot."""
        self._entries[address] = entry
        for policy in self._policies_of(address, entry):
            policy.insert(address.key, entry.meta, now)
        stride = self._arena.stride(address.group)
        self.used_bytes += stride
        self._salt_bytes[salt_of(entry.extras)] += stride

    def touch(self, addresses: Iterable[Address], now: float) -> None:
        """Note a use of those that are here."""
        for address in addresses:
            entry = self._entries.get(address)
            if entry is not None:
                for policy in self._policies_of(address, entry):
                    policy.touch([address.key], now)

    def end_reading(self, address: Address, entry: Entry, now: float) -> None:
        """A load has copied a block: a use; if it was removed meanwhile its slot is free now."""
        entry.readers -= 1
        if self._entries.get(address) is entry:
            self.touch([address], now)
        elif not entry.readers:
            self._arena.give(address.group, entry.slot)

    def pin(self, address: Address, deadline: float, now: float) -> bool:
        """Keep a block until `deadline`."""
        entry = self.get(address, now)
        if entry is None:
            return False
        entry.pinned_until = max(entry.pinned_until, deadline)
        if deadline < math.inf:
            heapq.heappush(self._pins, (deadline, address))
        return True

    def unpin(self, address: Address, now: float) -> None:
        """Let a block be evicted again."""
        entry = self._entries.get(address)
        if entry is not None and entry.pinned_until > -math.inf:
            entry.pinned_until = -math.inf
            self.touch([address], now)

    def remove(self, address: Address, reason: EvictReason) -> bool:
        """Take a block out; its slot is free, or will be when it was read. False if it is not here."""
        entry = self._entries.pop(address, None)
        if entry is None:
            return False
        for policy in self._policies_of(address, entry):
            policy.remove(address.key)
        stride = self._arena.stride(address.group)
        self.used_bytes -= stride
        salt = salt_of(entry.extras)
        self._salt_bytes[salt] -= stride
        if not self._salt_bytes[salt]:
            del self._salt_bytes[salt]
            for group in range(len(self._policies)):
                self._salted.pop((salt, group), None)
        self.evictions[reason] += 1
        if not entry.readers:
            self._arena.give(address.group, entry.slot)
        return True

    def fits_quota(self, salt: str, group: int, planned: int, now: float) -> bool:
        """Whether a salt may have one more block beside `planned` bytes, after others of it have gone."""
        stride = self._arena.stride(group)
        while self._quota is not None and self._salt_bytes[salt] + planned + stride > self._quota:
            own = self._salted.get((salt, group))
            if own is None or not self._evict(group, own, 1, now, "quota"):
                return False
        return True

    def make_room(self, group: int, count: int, now: float) -> None:
        """Let the expired go, then the policy's victims, until so many slots are free or none can go."""
        self._end_pins(now)
        for number, policy in enumerate(self._policies):
            for key in policy.expired(now):
                self.remove(Address(key, number), "expired")
        missing = count - self._arena.free(group)
        if missing > 0:
            self._evict(group, self._policies[group], missing, now, "space")

    def clear(self) -> None:
        """Forget all."""
        for address in list(self._entries):
            self.remove(address, "deleted")

    def _evict(self, group: int, policy: EvictionPolicy, count: int, now: float, reason: EvictReason) -> bool:
        """Remove up to `count` victims of a policy; whether there were any."""
        victims = policy.victims(count, _Pinned(self._entries, group, now), now)
        for key in victims:
            self.remove(Address(key, group), reason)
        return bool(victims)

    def _policies_of(self, address: Address, entry: Entry) -> list[EvictionPolicy]:
        policies = [self._policies[address.group]]
        if self._quota is not None:
            salt = salt_of(entry.extras)
            own = self._salted.get((salt, address.group))
            if own is None:
                own = self._salted[salt, address.group] = make_policy(self.policy_name)
            policies.append(own)
        return policies

    def _end_pins(self, now: float) -> None:
        """Policies look again at what they found pinned only when it is touched."""
        while self._pins and self._pins[0][0] <= now:
            _, address = heapq.heappop(self._pins)
            entry = self._entries.get(address)
            if entry is not None and entry.pinned_until <= now:
                self.touch([address], now)


class _Pinned:
    """The keys of a group that must stay: pinned, or being read."""

    def __init__(self, entries: dict[Address, Entry], group: int, now: float) -> None:
        self._entries = entries
        self._group = group
        self._now = now

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(Address(key, self._group)) if isinstance(key, bytes) else None
        return entry is not None and (entry.readers > 0 or entry.pinned_until > self._now)
