"""A place that several engines share, with leases, for faults that a server cannot be told to have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faulty_tier import FaultyTier

from kvstrata.tiers.lease import Claim, Lease
from kvstrata.tiers.tier import Address, StoreContext


@dataclass
class MemoryLeases:
    """Leases in a dictionary. failing: calls raise. frozen: renewals are lost on their way.

    stored: whether the block of a key is where the leases are.
    """

    clock: Callable[[], float]
    failing: bool = False
    frozen: bool = False
    held: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)
    claims: int = 0
    stored: Callable[[bytes], bool] = lambda key: False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(
        self, leases: Sequence[Lease], seconds: float, watched: Sequence[Sequence[bytes]]
    ) -> list[Claim]:
        with self.lock:
            if self.failing:
                raise OSError("no route to the store")
            self.claims += 1
            return [self._claim(lease, seconds, names) for lease, names in zip(leases, watched, strict=True)]

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[bool]:
        with self.lock:
            if self.frozen or self.failing:
                return [True] * len(leases)
            return [self._renew(lease, seconds) for lease in leases]

    def release(self, leases: Sequence[Lease]) -> list[bool]:
        with self.lock:
            return [self._mine(lease) and self.held.pop(lease.name) is not None for lease in leases]

    def keep(self) -> None:
        """Whoever has leases keeps them for another minute."""
        with self.lock:
            self.held = {name: (value, self.clock() + 60.0) for name, (value, _) in self.held.items()}

    def names(self) -> set[bytes]:
        """Names of the leases that somebody has now."""
        with self.lock:
            return {name for name in self.held if self._value(name) is not None}

    def _claim(self, lease: Lease, seconds: float, names: Sequence[bytes]) -> Claim:
        won = self._value(lease.name) is None
        if won:
            self.held[lease.name] = (lease.value, self.clock() + seconds)
        seen = [self._value(name) for name in (lease.name, *names)]
        holders = tuple(value for value in seen if value is not None)
        return Claim(won, holders, self.stored(lease.name))

    def _renew(self, lease: Lease, seconds: float) -> bool:
        if self._mine(lease):
            self.held[lease.name] = (lease.value, self.clock() + seconds)
            return True
        return False

    def _mine(self, lease: Lease) -> bool:
        return self._value(lease.name) == lease.value

    def _value(self, name: bytes) -> bytes | None:
        value, until = self.held.get(name, (b"", float("-inf")))
        return value if until > self.clock() else None


class SharedTier(FaultyTier):
    """A place that several engines have among their tiers."""

    name = "shared"

    def __init__(
        self, context: StoreContext, clock: Callable[[], float], leases: MemoryLeases | None
    ) -> None:
        super().__init__(context, clock, 16 << 20)
        self.leases = leases
        self.lookups = 0
        if leases is not None:
            leases.stored = lambda key: super(SharedTier, self).lookup([Address(key, 0)])[0]

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> list[bool]:
        self.lookups += 1
        return super().lookup(addresses, segments)

    def close(self) -> None:
        """Others go on with it."""
