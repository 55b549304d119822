"""What keeps an entry of a tier's index from eviction: readers, and pins that end by themselves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

N = TypeVar("N")


class Holdable(Protocol):
    """readers: loads that copy it just now. pinned_until: by the monotonic clock, -inf for not at all."""

    readers: int
    pinned_until: float


class Held:
    """The names that policies must leave alone now. find: the entry of a name, if there is one."""

    def __init__(self, find: Callable[[bytes], Holdable | None], now: float) -> None:
        self._find = find
        self._now = now

    def __contains__(self, name: object) -> bool:
        entry = self._find(name) if isinstance(name, bytes) else None
        return entry is not None and (entry.readers > 0 or entry.pinned_until > self._now)


class PinEnds(Generic[N]):
    """When pins end: policies look again at what they found pinned only when they are told."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, N]] = []

    def pin(self, name: N, entry: Holdable, deadline: float) -> None:
        """Keep an entry until a time; a pin is not shortened by another."""
        entry.pinned_until = max(entry.pinned_until, deadline)
        if deadline < math.inf:
            heapq.heappush(self._ends, (deadline, name))

    def lapsed(self, now: float) -> Iterator[N]:
        """Names of which a pin has ended since the last call; another may hold the entry still."""
        while self._ends and self._ends[0][0] <= now:
            yield heapq.heappop(self._ends)[1]
