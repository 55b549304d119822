"""Leads and follows of one engine under one roof: what loads and scheduler see of other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.cache.manager import KVCache
from kvstrata.engine.cost import LoadPlan, PrefillMeter
from kvstrata.engine.following import Following, Verdict
from kvstrata.engine.leading import Leading, LeaseCounts
from kvstrata.engine.lease_pace import LeasePace
from kvstrata.engine.request import Sequence
from kvstrata.tiers.lease import new_owner
from kvstrata.tiers.lease_desk import LeaseDesk
from kvstrata.tiers.tier import Address

__all__ = ["Election", "LeaseCounts", "Verdict"]


class Election:
    """Elects who computes what several processes lack. token_budget: of a step. clock: seconds."""

    def __init__(
        self,
        desk: LeaseDesk,
        prefill: PrefillMeter,
        cache: KVCache,
        *,
        token_budget: int,
        clock: Callable[[], float],
    ) -> None:
        owner, size = new_owner(), cache.block_size
        self._block_size = size
        self.pace = LeasePace(desk, prefill, size, token_budget)
        self._leading = Leading(
            desk,
            self.pace,
            owner=owner,
            block_size=size,
            groups=len(cache.groups),
            ahead=-(-token_budget // size),
            clock=clock,
        )
        self._following = Following(desk, self.pace, self._leading, owner=owner, block_size=size, clock=clock)

    @property
    def counts(self) -> LeaseCounts:
        """What elections came to so far."""
        return self._leading.counts

    @property
    def pending(self) -> bool:
        """Whether sequences wait for leases or leaders."""
        return self._following.pending

    def meets(self, sequence: Sequence) -> bool:
        """Whether a sequence waits here."""
        return self._following.meets(sequence)

    def rests(self, sequence: Sequence) -> bool:
        """See `Following.rests`."""
        return self._following.rests(sequence)

    def seconds_to_look(self) -> float:
        """See `Following.seconds_to_look`."""
        return self._following.seconds_to_look()

    def decide(self, sequence: Sequence, plan: LoadPlan, end: int, load_seconds: float) -> Verdict:
        """See `Following.decide`."""
        return self._following.decide(sequence, plan, end, load_seconds)

    def part(self, sequence: Sequence, available: int, *, whole: bool) -> None:
        """See `Following.part`."""
        self._following.part(sequence, available, whole=whole)

    def advanced(self, sequence: Sequence) -> None:
        """A sequence was opened, or some of it was computed."""
        self._leading.advance(sequence, sequence.num_computed // self._block_size)

    def leave(self, sequence: Sequence) -> None:
        """A sequence is over, or has to wait for its place."""
        self._following.part(sequence, 0)
        self._leading.leave(sequence)

    def displaced(self) -> list[Sequence]:
        """Leaders that come to a segment which another process leads."""
        return self._leading.displaced()

    def settled(self, addresses: Iterable[Address]) -> None:
        """Stores of these have ended; and renewals, and claims, are looked after."""
        self._leading.stored(addresses)
        self._leading.tend()
