"""A sequence's hold on the cache: its tokens, and for each layer group the blocks that have their K and V."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.cache.index import NO_BLOCK, Node
from kvstrata.cache.keys import KeyChain
from kvstrata.cache.retention import Retention

BlockTable = list[int]  # physical blocks by block position; NO_BLOCK where a window has moved past


@dataclass(eq=False)
class CacheSequence:
    """Made by `KVCache.open` and `fork`, given back once by `release`; only `KVCache` changes it.

    tables: one for each layer group; seen: which tokens its queries see in each. num_computed: tokens whose
    K and V the pool holds. prompt_tokens: where the prompt ends and the answer begins. reserve_tokens: length
    up to which its growth is reserved. reserved: blocks still reserved, by group. ttl: seconds that what it
    publishes is served, None for ever; spread: share of it that was taken off. tip: node of the last block
    that it found or published; num_published: blocks up to there.
    """

    chain: KeyChain
    tables: tuple[BlockTable, ...]
    num_computed: int
    prompt_tokens: int
    reserve_tokens: int
    reserved: list[int]
    priority: int
    ttl: float | None
    tip: Node | None
    num_published: int
    released: bool = False
    spread: float = 0.0
    seen: tuple[Retention, ...] = ()
    slipped: list[int] = field(default_factory=list)  # by group, up to where only sinks are left

    def blocks(self, group: int) -> npt.NDArray[np.int64]:
        """Physical blocks that this sequence holds in a group, in the order of positions."""
        table, slipped = self.tables[group], self.slipped[group]
        kept = min(slipped, self.seen[group].hidden_blocks(0, self.chain.block_size).start)
        return held_blocks(table[:kept] + table[slipped:])


def held_blocks(table: BlockTable) -> npt.NDArray[np.int64]:
    """The physical blocks in a table, as the pool takes many at a time."""
    blocks = np.fromiter(table, dtype=np.int64, count=len(table))
    held: npt.NDArray[np.int64] = blocks[blocks != NO_BLOCK]
    return held
