"""One layer group of the cache: its pool, its policy, what is promised to sequences, and its counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch

from kvstrata.cache.index import NO_BLOCK, Node, PrefixIndex
from kvstrata.cache.layout import BlockLayout
from kvstrata.cache.policies import make_policy
from kvstrata.cache.policy import Meta
from kvstrata.cache.pool import BlockPool
from kvstrata.cache.retention import Retention

EvictReason = Literal["space", "expired", "unreachable", "reset", "wrong"]


class CacheGroup:
    """What the manager keeps for each group of layers.

    nodes: by physical block, the index node whose content it holds (published) or None (private). metas:
    what the policy was told of it. reserved: blocks promised to sequences, always covered by free and
    cached ones, for every cached block can be evicted: whoever holds a block holds all before it, or needs
    none, as in a window group or under a retention.
    """

    def __init__(
        self,
        number: int,
        layout: BlockLayout,
        num_blocks: int,
        *,
        device: torch.device | str,
        max_chunk: int,
        policy: str,
    ) -> None:
        self.number = number
        self.window = layout.group.window
        self.block_size = layout.block_size
        self.pool = BlockPool(layout, num_blocks, device)
        self.policy = make_policy(policy, chained=self.window is None)
        self.nodes: list[Node | None] = [None] * num_blocks
        self.metas: dict[int, Meta] = {}
        self.reserved = 0
        self.evictions: Counter[EvictReason] = Counter()
        self.copies = 0
        self.published = 0
        self.merged = 0
        self._max_chunk = max_chunk

    @property
    def unreserved(self) -> int:
        """Free or cached blocks that are promised to nobody."""
        return self.pool.num_free + self.pool.num_cached - self.reserved

    def capacity_blocks(self, retention: Retention) -> int | None:
        """Blocks of the longest sequence that this group alone can hold; None if there is no limit."""
        most = retention.within(self.window).most_blocks(self._max_chunk, self.block_size)
        return None if most is not None and self.pool.num_blocks >= most else self.pool.num_blocks

    def promise(self, seen: Retention, remaining: int, alive: int) -> int:
        """Blocks to reserve for a sequence that has `alive` blocks and is to fill `remaining` more.

        seen: which tokens its queries see in this group.
        """
        most = seen.most_blocks(self._max_chunk, self.block_size)
        return remaining if most is None else min(remaining, max(0, most - alive))

    def blocks_of(self, nodes: Iterable[Node]) -> list[int]:
        """The block of each node in this group, NO_BLOCK where there is none."""
        number = self.number
        return [node.blocks[number] for node in nodes]

    def publish(self, block: int, node: Node, meta: Meta) -> None:
        """Make a held block findable as the content of `node`."""
        node.blocks[self.number] = block
        self.nodes[block] = node
        self.metas[block] = meta
        self.pool.keep(block)
        self.policy.insert(node.key, meta, meta.born)
        self.published += 1

    def mark_slipped(self, node: Node, slipped: bool, now: float) -> None:
        """Tell the policy whether the last sequence that used the block moved its window past it."""
        block = node.blocks[self.number]
        if self.metas[block].slipped is not slipped:
            self.metas[block] = replace(self.metas[block], slipped=slipped)
            self.policy.insert(node.key, self.metas[block], now)

    def mark_dirty(self, node: Node, dirty: bool, now: float) -> None:
        """Tell the policy whether the content of `node` would be lost with its block."""
        block = node.blocks[self.number]
        if block != NO_BLOCK and self.metas[block].dirty is not dirty:
            self.metas[block] = replace(self.metas[block], dirty=dirty)
            self.policy.insert(node.key, self.metas[block], now)

    def forget(self, node: Node, reason: EvictReason) -> Meta | None:
        """Make the block of `node` unfindable, and free it unless it is held; None if there is no such
        block.
        """
        block = node.blocks[self.number]
        if block == NO_BLOCK:
            return None
        node.blocks[self.number] = NO_BLOCK
        self.nodes[block] = None
        self.policy.remove(node.key)
        self.pool.forget(block)
        self.evictions[reason] += 1
        return self.metas.pop(block)


class HeldKeys:
    """The keys whose block of a group is in a table or pinned: what its policy must leave alone."""

    def __init__(self, index: PrefixIndex, group: CacheGroup) -> None:
        self._index = index
        self._group = group

    def __contains__(self, key: object) -> bool:
        node = self._index.get(key) if isinstance(key, bytes) else None
        return node is not None and bool(self._group.pool.refs[node.blocks[self._group.number]] > 0)
