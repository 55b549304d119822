"""Stores that nobody waits for: blocks are copied aside at once, and the tiers take them from there.

The pool's block is free again as soon as it was copied, so a tier that is slow, or hangs for good while it
reads, holds memory of this queue's and none of the pool's. Each tier may have its share of the queue under
way; what does not fit is dropped for that tier and counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstrata.cache.policy import Meta
from kvstrata.tiers.arena import Bytes, SlotArena
from kvstrata.tiers.handle import TierHandle
from kvstrata.tiers.tier import Address, DropReason, Identity, Record, Stored


@dataclass(frozen=True)
class Offer:
    """A block to be kept. payload: uint8 `[payload_bytes]`, read before `offer` returns."""

    identity: Identity
    meta: Meta
    payload: Bytes


@dataclass(frozen=True)
class Settled:
    """What became of an accepted block: kept by some tier, or why the last one did not."""

    address: Address
    dropped: DropReason | None


class _Batch:
    """Records that tiers are storing from their slots."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.slots: list[int] = []
        self.dropped: list[DropReason | None] = []  # None as soon as one tier has kept it
        self.waiting = 0


class WriteBehind:
    """A bounded queue in front of the tiers' stores. One thread offers, collects and drains.

    size: bytes of the queue. drops: blocks not taken, by tier and reason.
    """

    def __init__(self, handles: Sequence[TierHandle], payload_bytes: Sequence[int], size: int) -> None:
        self._handles = tuple(handles)
        self._arena = SlotArena(payload_bytes, size, "the queue to the tiers")
        self._share = max(1, self._arena.slots // max(1, len(self._handles)))
        self._under_way = [[0] * len(payload_bytes) for _ in self._handles]
        self._ended: deque[tuple[int, _Batch, list[int], Future[list[Stored]]]] = deque()
        self._batches = 0
        self.drops: Counter[tuple[str, str]] = Counter()

    @property
    def pending(self) -> bool:
        """Whether some tier is still storing."""
        return self._batches > 0

    def has_room(self, group: int) -> bool:
        """Whether some tier would get a block of this group that is offered now."""
        return self._arena.free(group) > 0 and any(
            handle.takes and under_way[group] < self._share
            for handle, under_way in zip(self._handles, self._under_way, strict=True)
        )

    def offer(self, offers: Sequence[Offer], tiers: Sequence[int]) -> list[bool]:
        """Copy blocks aside for these tiers; which of them some tier will get."""
        takers = [tier for tier in tiers if self._handles[tier].takes]
        for tier in set(tiers).difference(takers):
            self.drops[self._handles[tier].name, "unavailable"] += len(offers)
        taken: list[bool] = []
        records: dict[int, list[int]] = {tier: [] for tier in takers}
        batch = _Batch()
        for offer in offers:
            group = offer.identity.address.group
            free = [tier for tier in takers if self._under_way[tier][group] < self._share]
            slot = self._arena.take(group) if free else None
            if slot is None:
                free = []
            else:
                self._copy(offer, slot, batch)
            for tier in takers:
                if tier in free:
                    self._under_way[tier][group] += 1
                    records[tier].append(len(batch.records) - 1)
                else:
                    self.drops[self._handles[tier].name, "queue_full"] += 1
            taken.append(bool(free))
        self._send(batch, records)
        return taken

    def collect(self) -> list[Settled]:
        """Blocks whose stores have ended since the last call; their slots are free again."""
        settled: list[Settled] = []
        while self._ended:
            tier, batch, picked, future = self._ended.popleft()
            self._account(tier, batch, picked, future)
            batch.waiting -= 1
            if not batch.waiting:
                self._batches -= 1
                for record, slot, dropped in zip(batch.records, batch.slots, batch.dropped, strict=True):
                    self._arena.give(record.identity.address.group, slot)
                    settled.append(Settled(record.identity.address, dropped))
        return settled

    def _copy(self, offer: Offer, slot: int, batch: _Batch) -> None:
        aside = self._arena.view(offer.identity.address.group, slot)
        np.copyto(aside, offer.payload)
        batch.records.append(Record(offer.identity, offer.meta, aside.data))
        batch.slots.append(slot)
        batch.dropped.append("io_error")

    def _send(self, batch: _Batch, records: dict[int, list[int]]) -> None:
        """Hand each tier its part of a batch."""
        sends = [(tier, picked) for tier, picked in records.items() if picked]
        batch.waiting = len(sends)
        self._batches += bool(sends)
        for tier, picked in sends:
            future = self._handles[tier].store([batch.records[n] for n in picked])
            future.add_done_callback(partial(self._end, tier, batch, picked))

    def _end(self, tier: int, batch: _Batch, picked: list[int], future: Future[list[Stored]]) -> None:
        """In a tier's thread: only note it."""
        self._ended.append((tier, batch, picked, future))

    def _account(self, tier: int, batch: _Batch, picked: list[int], future: Future[list[Stored]]) -> None:
        broken = future.exception() is not None
        outcomes = [Stored("io_error")] * len(picked) if broken else future.result()
        for number, outcome in zip(picked, outcomes, strict=True):
            self._under_way[tier][batch.records[number].identity.address.group] -= 1
            if outcome.dropped is None:
                batch.dropped[number] = None
            else:
                self.drops[self._handles[tier].name, outcome.dropped] += 1
                if batch.dropped[number] is not None:
                    batch.dropped[number] = outcome.dropped
