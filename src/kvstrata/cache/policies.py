"""The policies `lru`, `lrfu`, `fifo` and `ttl`: one lazy heap, and for each a rank by which it is ordered.

The chain rule holds whatever the rank: where `chained`, an entry whose children are here too is never a
victim, because a hit is a run of blocks from the first on and a tail without its head is worth nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from kvstrata.cache.policy import EvictionPolicy, Meta
from kvstrata.errors import ConfigError

Rank = tuple[float, ...]
# A level of priority is worth so many seconds of recency: important content stays longer, not for ever.
PRIORITY_SECONDS = 600.0
# Of `lrfu`: a use counts half as much after so many seconds.
HALF_LIFE_SECONDS = 120.0


@dataclass(frozen=True)
class _Order:
    """rank: what goes first, of meta and score. note_use: change the scores of keys for a use at `now`."""

    rank: Callable[[Meta, float], Rank]
    note_use: Callable[[dict[bytes, float], Iterable[bytes], float], None]


def _latest(scores: dict[bytes, float], keys: Iterable[bytes], now: float) -> None:
    for key in keys:
        scores[key] = now


def _decayed_uses(scores: dict[bytes, float], keys: Iterable[bytes], now: float) -> None:
    for key in keys:
        scores[key] = _one_use_more(scores[key], now)


def _one_use_more(score: float, now: float) -> float:
    """Time plus half-lives times log2 of the uses, each halved with age: in this form it does not age.

    Lee et al., "LRFU", IEEE Transactions on Computers 50(12), 2001: the combined recency and frequency value
    sum(2 ** -((now - use) / half-life)), whose order between entries does not change with time.
    """
    return now + HALF_LIFE_SECONDS * math.log2(1.0 + 2.0 ** min(1000.0, (score - now) / HALF_LIFE_SECONDS))


def _credit(meta: Meta) -> float:
    return PRIORITY_SECONDS * meta.priority


_BY_SCORE: Callable[[Meta, float], Rank] = lambda meta, score: (score + _credit(meta),)  # noqa: E731
ORDERS: dict[str, _Order] = {
    "lru": _Order(_BY_SCORE, _latest),
    "lrfu": _Order(_BY_SCORE, _decayed_uses),
    "fifo": _Order(lambda meta, score: (meta.born + _credit(meta),), _latest),
    "ttl": _Order(lambda meta, score: (meta.deadline + _credit(meta), meta.born), _latest),
}


def make_policy(name: str, *, chained: bool = True) -> EvictionPolicy:
    """The policy called `name`: `lru`, `lrfu`, `fifo` or `ttl`. Raises ConfigError for another.

    lru: least recently used first. lrfu: least recently and least often used first. fifo: in the order of
    publishing. ttl: soonest to expire first. chained: see the module; false for window groups, whose blocks
    are found without those before them.
    """
    if name not in ORDERS:
        raise ConfigError(f"policy {name!r} is unknown: choose one of {', '.join(ORDERS)}")
    return RankedPolicy(ORDERS[name], chained=chained)


class RankedPolicy:
    """Entries in a heap by (slipped ones first, dirty ones last, rank, tails first, order of arrival).

    The heap is lazy: it may hold outdated items, told by their serial number, and each entry has at most one
    that counts. An entry with children, or found pinned, has none until its last child goes or it is touched.
    Each operation is O(log n) amortised.
    """

    def __init__(self, order: _Order, *, chained: bool) -> None:
        self._order = order
        self._chained = chained
        self._meta: dict[bytes, Meta] = {}
        self._scores: dict[bytes, float] = {}
        self._children: dict[bytes, int] = {}
        self._heap: list[tuple[Rank, int, bytes, float]] = []  # the last is the score of the rank
        self._offered: dict[bytes, int] = {}
        self._aside: set[bytes] = set()
        self._deadlines: list[tuple[float, int, bytes]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._meta)

    def __contains__(self, key: bytes) -> bool:
        return key in self._meta

    def insert(self, key: bytes, meta: Meta, now: float) -> None:
        """Add an entry, last used `now`, or give the one of that key a new meta."""
        score = now
        if key in self._meta:
            score = max(now, self._scores[key])
            self.remove(key)
        self._meta[key] = meta
        self._scores[key] = score
        if self._chained:
            self._children[meta.parent] = self._children.get(meta.parent, 0) + 1
        if key not in self._children:
            self._offer(key)
        if meta.deadline < math.inf:
            self._await_deadline(key)

    def touch(self, keys: Iterable[bytes], now: float) -> None:
        """Note a use, and look again at those that were set aside because they were pinned."""
        scores = self._scores
        known = [key for key in keys if key in scores]
        self._order.note_use(scores, known, now)
        if self._aside:
            for key in known:
                if key in self._aside:
                    self._aside.remove(key)
                    self._offer(key)

    def remove(self, key: bytes) -> None:
        """Drop an entry, if it is here; its parent may be a victim again."""
        meta = self._meta.pop(key, None)
        if meta is None:
            return
        del self._scores[key]
        self._offered.pop(key, None)
        self._aside.discard(key)
        if self._chained:
            self._orphan(meta.parent)
        limit = 2 * len(self._meta) + 64
        if len(self._heap) > limit or len(self._deadlines) > limit:
            self._compact(limit)

    def victims(self, n: int, pinned: Container[bytes], now: float) -> list[bytes]:
        """Up to `n` entries, first to go first, the expired ones before all; they leave the policy."""
        due = self._pop_due(now)
        chosen = [key for key in due if key not in pinned][:n]
        for key in chosen:
            self.remove(key)
        for key in due:
            if key in self._meta:
                self._await_deadline(key)
        while len(chosen) < n:
            first = self._pop_first(pinned)
            if first is None:
                break
            self.remove(first)
            chosen.append(first)
        return chosen

    def expired(self, now: float) -> list[bytes]:
        """Entries whose deadline has come, earliest first, pinned or not; they leave the policy."""
        due = self._pop_due(now)
        for key in due:
            self.remove(key)
        return due

    def clear(self) -> None:
        """Drop all entries."""
        for part in (self._meta, self._scores, self._children, self._offered):
            part.clear()
        self._heap.clear()
        self._deadlines.clear()
        self._aside.clear()

    def _offer(self, key: bytes) -> None:
        self._serial += 1
        self._offered[key] = self._serial
        meta, score = self._meta[key], self._scores[key]
        rank = (not meta.slipped, meta.dirty, *self._order.rank(meta, score), -meta.depth)
        heapq.heappush(self._heap, (rank, self._serial, key, score))

    def _await_deadline(self, key: bytes) -> None:
        self._serial += 1
        heapq.heappush(self._deadlines, (self._meta[key].deadline, self._serial, key))

    def _orphan(self, parent: bytes) -> None:
        """One child of `parent` went: with its last one it may be a victim again."""
        left = self._children.pop(parent) - 1
        if left:
            self._children[parent] = left
            return
        if parent in self._meta and parent not in self._offered and parent not in self._aside:
            self._offer(parent)

    def _pop_first(self, pinned: Container[bytes]) -> bytes | None:
        while self._heap:
            _, serial, key, score = heapq.heappop(self._heap)
            if self._offered.get(key) != serial:
                continue
            del self._offered[key]
            if key in self._children:
                continue  # offered again when its last child goes
            if key in pinned:
                self._aside.add(key)
            elif score != self._scores[key]:
                self._offer(key)  # used since it was offered
            else:
                return key
        return None

    def _pop_due(self, now: float) -> list[bytes]:
        due: dict[bytes, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, key = heapq.heappop(self._deadlines)
            if self._is_due_at(key, deadline):
                due[key] = None
        return list(due)

    def _compact(self, limit: int) -> None:
        """Drop outdated items once they are more than half, so that the heaps follow the entries."""
        if len(self._heap) > limit:
            self._heap = [item for item in self._heap if self._offered.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
        if len(self._deadlines) > limit:
            latest = {key: (at, no, key) for at, no, key in self._deadlines if self._is_due_at(key, at)}
            self._deadlines = list(latest.values())
            heapq.heapify(self._deadlines)

    def _is_due_at(self, key: bytes, deadline: float) -> bool:
        return key in self._meta and self._meta[key].deadline == deadline
