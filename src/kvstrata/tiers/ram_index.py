"""What the RAM tier holds: an entry a block, and which goes when room is needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from kvstrata.cache.keys import salt_of
from kvstrata.cache.policies import make_policy
from kvstrata.cache.policy import EvictionPolicy, Meta
from kvstrata.tiers.arena import SlotArena
from kvstrata.tiers.holding import Held, PinEnds
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

    def __init__(self, arena: SlotArena, chained: Sequence[bool], policy: str, quota: int | None) -> None:
        self.evictions: Counter[str] = Counter()
        self.used_bytes = 0
        self._arena = arena
        self._entries: dict[Address, Entry] = {}
        self.policy_name = policy
        self._policies = [make_policy(policy, chained=each) for each in chained]
        self._chained = tuple(chained)
        self._quota = quota
        self._salted: dict[tuple[str, int], EvictionPolicy] = {}
        self._salt_bytes: Counter[str] = Counter()
        self._pins: PinEnds[Address] = PinEnds()
        self._pinned: set[Address] = set()  # some of them perhaps not any more
        self._reading = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, address: Address, now: float | None) -> Entry | None:
        """The entry of an address; with `now`, only if it may still be served then."""
        entry = self._entries.get(address)
        return None if entry is None or (now is not None and entry.meta.deadline <= now) else entry

    def insert(self, address: Address, entry: Entry, now: float) -> None:
        """Add a block whose bytes are in its slot."""
        self._entries[address] = entry
        self.used_bytes += self._arena.stride(address.group)
        if self._quota is None:  # said apart: this is most of what a store costs beside the copy
            self._policies[address.group].insert(address.key, entry.meta, now)
            return
        for policy in self._policies_of(address, entry):
            policy.insert(address.key, entry.meta, now)
        self._salt_bytes[salt_of(entry.extras)] += self._arena.stride(address.group)

    def prolong(self, address: Address, deadline: float, now: float) -> None:
        """Serve a block that is here until `deadline`."""
        entry = self._entries[address]
        entry.meta = replace(entry.meta, deadline=deadline)
        for policy in self._policies_of(address, entry):
            policy.insert(address.key, entry.meta, now)

    def touch(self, addresses: Iterable[Address], now: float) -> None:
        """Note a use of those that are here."""
        for address in addresses:
            entry = self._entries.get(address)
            if entry is not None:
                for policy in self._policies_of(address, entry):
                    policy.touch([address.key], now)

    def begin_reading(self, entry: Entry) -> None:
        """A load is going to copy a block: its slot is not used again before `end_reading`."""
        entry.readers += 1
        self._reading += 1

    def end_reading(self, address: Address, entry: Entry, now: float) -> None:
        """A load has copied a block: a use; if it was removed meanwhile its slot is free now."""
        entry.readers -= 1
        self._reading -= 1
        if self._entries.get(address) is entry:
            self.touch([address], now)
        elif not entry.readers:
            self._arena.give(address.group, entry.slot)

    def pin(self, address: Address, deadline: float, now: float) -> bool:
        """Keep a block until `deadline`."""
        entry = self.get(address, now)
        if entry is None:
            return False
        self._pins.pin(address, entry, deadline)
        self._pinned.add(address)
        return True

    def unpin(self, address: Address, now: float) -> None:
        """Let a block be evicted again."""
        entry = self._entries.get(address)
        if entry is not None and entry.pinned_until > -math.inf:
            entry.pinned_until = -math.inf
            self._pinned.discard(address)
            self.touch([address], now)

    def remove(self, address: Address, reason: EvictReason) -> bool:
        """Take a block out; its slot is free, or will be when it was read. False if it is not here."""
        entry = self._entries.pop(address, None)
        if entry is None:
            return False
        if self._pinned:
            self._pinned.discard(address)
        self.used_bytes -= self._arena.stride(address.group)
        if self._quota is None:
            self._policies[address.group].remove(address.key)
        else:
            for policy in self._policies_of(address, entry):
                policy.remove(address.key)
            self._uncount(salt_of(entry.extras), address.group)
        self.evictions[reason] += 1
        if not entry.readers:
            self._arena.give(address.group, entry.slot)
        return True

    def fits_quota(self, extras: bytes, group: int, planned: Counter[str], now: float) -> bool:
        """Whether a block's salt may have one more beside what is `planned`, which then has it too.

        planned: bytes by salt. Others of the salt go for it.
        """
        if self._quota is None:
            return True
        salt, stride = salt_of(extras), self._arena.stride(group)
        while self._salt_bytes[salt] + planned[salt] + stride > self._quota:
            own = self._salted.get((salt, group))
            if own is None or not self._evict(group, own, 1, now, "quota"):
                return False
        planned[salt] += stride
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
        held: Container[bytes] = ()
        if self._reading or self._pinned:
            held = Held(lambda key: self._entries.get(Address(key, group)), now)
        victims = policy.victims(count, held, now)
        for key in victims:
            self.remove(Address(key, group), reason)
        return bool(victims)

    def _uncount(self, salt: str, group: int) -> None:
        """A block of a salt is gone; with its last one the salt is forgotten."""
        self._salt_bytes[salt] -= self._arena.stride(group)
        if not self._salt_bytes[salt]:
            del self._salt_bytes[salt]
            for each in range(len(self._policies)):
                self._salted.pop((salt, each), None)

    def _policies_of(self, address: Address, entry: Entry) -> tuple[EvictionPolicy, ...]:
        policy = self._policies[address.group]
        if self._quota is None:
            return (policy,)
        place = salt_of(entry.extras), address.group
        own = self._salted.get(place)
        if own is None:
            own = make_policy(self.policy_name, chained=self._chained[address.group])
            self._salted[place] = own
        return (policy, own)

    def _end_pins(self, now: float) -> None:
        """Policies look again at what they found pinned only when it is touched."""
        for address in self._pins.lapsed(now):
            entry = self._entries.get(address)
            if entry is None or entry.pinned_until <= now:
                self._pinned.discard(address)
                self.touch([address], now)
