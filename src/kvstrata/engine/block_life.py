"""What becomes of cached blocks: how long they live, how long unused, when used again, or evicted too early.

Thrashing is work that a larger cache would have saved: tokens computed although their block was in the pool a
short time ago. A bounded list of the keys that were evicted last (a ghost list, as in ARC: Megiddo and Modha,
FAST 2003) finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.cache.group import EvictReason
from kvstrata.cache.keys import KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.cache.policy import Meta
from kvstrata.engine.histogram import Histogram, Recent

GHOST_SECONDS = 600.0  # an eviction is too early if its block is computed again within that time
RATE_SECONDS = 60.0
_GHOSTS_PER_BLOCK = 4
_MOST_GHOSTS = 1 << 18
_LIVES = (0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86400.0, 7 * 86400.0)
_MOST_PREFIXES = 256
FIRST_TOKENS = 32


@dataclass
class Prefix:
    """A prefix that requests found in the pool. tokens: its length. first: its first token ids."""

    key: bytes
    tokens: int
    first: list[int]
    hits: int = 0


class BlockLife:
    """Watches a cache; see `cache.contents.Watcher`. lifetime, idle, reuse: seconds.

    evictions: blocks by reason. thrashed: tokens computed again within `GHOST_SECONDS` of their eviction.
    """

    def __init__(self, cache: KVCache) -> None:
        self.lifetime = Histogram(_LIVES)
        self.idle = Histogram(_LIVES)
        self.reuse = Histogram(_LIVES)
        self.evictions: Counter[str] = Counter()
        self.eviction_rate = Recent(RATE_SECONDS)
        self.thrashed = 0
        self._clock: Callable[[], float] = cache.clock
        self._block_size = cache.block_size
        self._used: tuple[dict[bytes, float], ...] = tuple({} for _ in cache.groups)
        self._ghosts: dict[bytes, float] = {}  # when each was evicted, the oldest first
        blocks = sum(group.pool.num_blocks for group in cache.groups)
        self._most_ghosts = min(_GHOSTS_PER_BLOCK * blocks, _MOST_GHOSTS)
        self._prefixes: dict[bytes, Prefix] = {}
        cache.watch(self)

    def published(self, key: bytes, group: int, meta: Meta, *, loaded: bool) -> None:
        """A block can be found: was it there not long ago?"""
        self._used[group][key] = meta.born
        evicted = self._ghosts.pop(key, None) if self._ghosts else None
        if evicted is not None and not loaded and meta.born - evicted <= GHOST_SECONDS:
            self.thrashed += self._block_size

    def evicted(self, key: bytes, group: int, meta: Meta, reason: EvictReason) -> None:
        """A block is gone: how long was it there, and how long unused?"""
        now = self._clock()
        self.evictions[reason] += 1
        used = self._used[group].pop(key, meta.born)
        if reason in {"reset", "wrong"}:
            self._prefixes.pop(key, None)
            return
        self.lifetime.observe(max(0.0, now - meta.born))
        self.idle.observe(max(0.0, now - used))
        if reason == "expired" or meta.slipped:  # nobody wanted it there any more
            return
        self.eviction_rate.add(1, now)
        self._ghosts.pop(key, None)
        self._ghosts[key] = now
        if len(self._ghosts) > self._most_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def hit(self, chain: KeyChain, num_blocks: int) -> None:
        """Blocks are used again: how long after the last time?"""
        now = self._clock()
        keys = chain.keys[:num_blocks]
        for used in self._used:
            before = [last for key in keys if (last := used.get(key)) is not None]
            if before:
                self.reuse.observe_all(np.maximum(0.0, now - np.array(before)))
                used.update((key, now) for key in keys if key in used)
        self._count_prefix(chain, num_blocks)

    def released(self, keys: Sequence[bytes], group: int) -> None:
        """The last holder of these blocks has let go of them."""
        used = self._used[group]
        now = self._clock()
        used.update((key, now) for key in keys if key in used)

    def now(self) -> float:
        """The time by the clock that evictions are counted by."""
        return self._clock()

    def forget_prefixes(self) -> None:
        """Keep nothing of what prompts began with."""
        self._prefixes.clear()

    def top_prefixes(self, count: int) -> list[Prefix]:
        """The prefixes found most often, by where hits ended; call it on the engine's thread."""
        ranked = sorted(self._prefixes.values(), key=lambda prefix: prefix.hits, reverse=True)
        return ranked[:count]

    def _count_prefix(self, chain: KeyChain, num_blocks: int) -> None:
        """Bounded: a new prefix takes the place, and the count, of the rarest (Metwally et al., ICDT 05)."""
        key = chain.keys[num_blocks - 1]
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = Prefix(key, num_blocks * self._block_size, chain.tokens[:FIRST_TOKENS].tolist())
            if len(self._prefixes) >= _MOST_PREFIXES:
                rarest = min(self._prefixes.values(), key=lambda each: each.hits)
                del self._prefixes[rarest.key]
                prefix.hits = rarest.hits
            self._prefixes[key] = prefix
        prefix.hits += 1
