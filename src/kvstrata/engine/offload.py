"""From the pool to the tiers: full blocks are queued as they are published, so that a kill loses little.

Blocks are copied aside within the step that published them; from then on the pool may evict them freely. What
the queue has no room for, or no tier could take, stays in the pool as dirty: it is evicted after all others,
and offered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from kvstrata.cache.manager import KVCache
from kvstrata.cache.policy import Meta
from kvstrata.tiers.stack import TierStack
from kvstrata.tiers.tier import Address, Identity
from kvstrata.tiers.write_behind import Offer, Settled

_DIRTY_AT_ONCE = 8  # so many are offered again in one step, that it stays short
_PAUSE = 1.0  # seconds until a tier that could not take some is asked again
_FAILED = frozenset(("io_error", "unavailable"))


class Offload:
    """Watches what a cache publishes and offers it to a stack of tiers. Only the engine's thread uses it."""

    def __init__(self, cache: KVCache, stack: TierStack) -> None:
        self._cache = cache
        self._stack = stack
        self._fresh: list[tuple[Address, int, Meta]] = []
        self._sources: Mapping[Address, int] = {}
        self._dirty: dict[Address, Meta] = {}
        self._retry_at = float("-inf")
        self._again: deque[tuple[Address, int | None, Callable[[], None]]] = deque()
        cache.watch_published(self._published)

    @property
    def renewing(self) -> int:
        """Blocks that wait to be offered again for a longer life."""
        return len(self._again)

    def renew(self, addresses: Iterable[Address], above: int | None, on_gone: Callable[[], None]) -> None:
        """Offer blocks of the pool to the tiers again, or to those above one, a few in each step.

        on_gone: called for each that has left the pool by then.
        """
        self._again.extend((address, above, on_gone) for address in addresses)

    @property
    def dirty(self) -> int:
        """Blocks in the pool that the queue had no room for, or no tier could take."""
        return len(self._dirty)

    def loaded(self, sources: Mapping[Address, int]) -> None:
        """What is published until the next `flush` came from these tiers: only those above want it."""
        self._sources = sources

    def flush(self) -> None:
        """Copy aside what was published since the last call, and some of what is dirty."""
        fresh, self._fresh = self._fresh, []
        by_source: dict[int | None, list[tuple[Address, int, Meta]]] = {}
        for address, block, meta in fresh:
            by_source.setdefault(self._sources.get(address), []).append((address, block, meta))
        self._sources = {}
        for source, blocks in by_source.items():
            if source != 0:
                self._offer(blocks, source)
        if self._dirty and self._cache.clock() >= self._retry_at:
            self._retry()
        if self._again:
            self._renew()

    def forget(self) -> None:
        """What waits to be offered is not wanted any more."""
        self._fresh.clear()
        self._dirty.clear()
        self._again.clear()

    def settle(self, settled: Iterable[Settled]) -> None:
        """Some stores have ended. What a tier had no use for is not asked again, what it could not is."""
        for done in settled:
            if done.dropped == "unavailable":
                self._retry_at = self._cache.clock() + _PAUSE
            if done.dropped in _FAILED and (meta := self._cache.meta_of(*done.address)) is not None:
                self._mark(done.address, meta)

    def _published(self, key: bytes, group: int, block: int, meta: Meta) -> None:
        self._fresh.append((Address(key, group), block, meta))

    def _offer(self, blocks: list[tuple[Address, int, Meta]], above: int | None) -> None:
        offers = []
        for address, block, meta in blocks:
            if self._cache.block_of(*address) == block:  # not evicted or forgotten since
                offers.append(self._describe(address, block, meta))
        for offer, taken in zip(offers, self._stack.offer(offers, above), strict=True):
            if not taken and above is None:
                self._mark(offer.identity.address, offer.meta)

    def _describe(self, address: Address, block: int, meta: Meta) -> Offer:
        content, parent = self._cache.content_of(address.key), self._cache.parent_of(address.key)
        assert content is not None
        assert parent is not None
        token_bytes = 4 * self._cache.block_size
        identity = Identity(
            address=address,
            parent=parent,
            token_ids=content[4 : 4 + token_bytes],
            extras=content[8 + token_bytes :],
            segment=meta.segment,
        )
        if meta.dirty or meta.slipped:
            meta = replace(meta, dirty=False, slipped=False)
        return Offer(identity, meta, self._cache.pools[address.group].payload(block).numpy())

    def _retry(self) -> None:
        """Offer dirty blocks again, the oldest first, while the queue takes them."""
        for address, meta in list(islice(self._dirty.items(), _DIRTY_AT_ONCE)):
            block = self._cache.block_of(*address)
            if block is not None:
                if not self._stack.has_room(address.group):
                    return
                if not any(self._stack.offer([self._describe(address, block, meta)])):
                    return  # the last tier that would have taken it was lost just now
            del self._dirty[address]
            self._cache.mark_dirty(*address, False)

    def _renew(self) -> None:
        for _ in range(min(_DIRTY_AT_ONCE, len(self._again))):
            address, above, on_gone = self._again[0]
            meta = self._cache.meta_of(*address)
            block = self._cache.block_of(*address)
            if meta is None or block is None:
                on_gone()
            elif self._stack.has_room(address.group):
                self._stack.offer([self._describe(address, block, meta)], above)
            else:
                return
            self._again.popleft()

    def _mark(self, address: Address, meta: Meta) -> None:
        self._dirty[address] = meta
        self._cache.mark_dirty(*address, True)
        if len(self._dirty) > 2 * sum(pool.num_blocks for pool in self._cache.pools):
            self._dirty = {a: m for a, m in self._dirty.items() if self._cache.block_of(*a) is not None}
