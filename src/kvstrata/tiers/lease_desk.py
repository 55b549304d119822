"""Asking for leases without waiting: calls go through the worker thread of the tier that keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvstrata.tiers.handle import TierHandle
from kvstrata.tiers.lease import Claim, Lease, LeaseStore

T = TypeVar("T")

_KEEP = 0.8  # weight of what was known of a round trip at each new one


class LeaseDesk:
    """The leases of one tier. tier: its number in the stack.

    A lookup of that tier that is asked for after a claim is made after it too.
    """

    def __init__(self, tier: int, handle: TierHandle, store: LeaseStore) -> None:
        self.tier = tier
        self._handle = handle
        self._store = store
        self._round_trip = 0.0

    @classmethod
    def of(cls, number: int, handle: TierHandle) -> LeaseDesk | None:
        """The desk of a tier that keeps leases (it has an attribute `leases`); None for the others."""
        store: LeaseStore | None = getattr(handle.tier, "leases", None)
        return None if store is None else cls(number, handle, store)

    @property
    def round_trip(self) -> float:
        """Seconds that a claim took of late; 0 before the first."""
        return self._round_trip

    def claim(
        self, leases: Sequence[Lease], seconds: float, watched: Sequence[Sequence[bytes]]
    ) -> Future[list[Claim]]:
        """See `LeaseStore.claim`."""
        return self._handle.post(self._timed, self._store.claim, leases, seconds, watched)

    def renew(self, leases: Sequence[Lease], seconds: float) -> Future[list[bool]]:
        """See `LeaseStore.renew`."""
        return self._handle.post(self._store.renew, leases, seconds)

    def release(self, leases: Sequence[Lease]) -> Future[list[bool]]:
        """See `LeaseStore.release`."""
        return self._handle.post(self._store.release, leases)

    def _timed(
        self,
        call: Callable[[Sequence[Lease], float, Sequence[Sequence[bytes]]], T],
        leases: Sequence[Lease],
        seconds: float,
        watched: Sequence[Sequence[bytes]],
    ) -> T:
        begin = time.perf_counter()
        result = call(leases, seconds, watched)
        took = time.perf_counter() - begin
        known = self._round_trip or took
        self._round_trip = _KEEP * known + (1 - _KEEP) * took
        return result
