"""Counts of the cache at one moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.cache.group import CacheGroup
from kvstrata.cache.index import NO_BLOCK, PrefixIndex
from kvstrata.cache.table import CacheSequence


@dataclass(frozen=True)
class GroupStats:
    """One layer group. Blocks: total = free + cached + held; reserved: promised, not taken yet.

    evictions: blocks made unfindable, by reason (space, expired, unreachable, reset, wrong). copies: shared
    blocks copied before a write. published: blocks made findable. merged: blocks given up because their
    content was there already. waste_slots: slots in blocks of sequences that hold no token's K and V yet.
    """

    total: int
    free: int
    cached: int
    held: int
    reserved: int
    evictions: Mapping[str, int]
    copies: int
    published: int
    merged: int
    waste_slots: int


@dataclass(frozen=True)
class CacheStats:
    """All groups. sequences: open ones. collisions: keys that were found with other content behind them."""

    groups: tuple[GroupStats, ...]
    sequences: int
    collisions: int
    block_size: int

    @property
    def waste(self) -> float:
        """Share of the pool's slots that are in sequences' blocks and hold nothing, all groups together."""
        slots = sum(group.total for group in self.groups) * self.block_size
        return sum(group.waste_slots for group in self.groups) / slots


def collect(
    groups: Sequence[CacheGroup], index: PrefixIndex, sequences: Collection[CacheSequence]
) -> CacheStats:
    """The counts of these groups, which these sequences use."""
    return CacheStats(
        groups=tuple(
            GroupStats(
                total=group.pool.num_blocks,
                free=group.pool.num_free,
                cached=group.pool.num_cached,
                held=group.pool.num_held,
                reserved=group.reserved,
                evictions={reason: count for reason, count in group.evictions.items() if count},
                copies=group.copies,
                published=group.published,
                merged=group.merged,
                waste_slots=_waste(group, sequences),
            )
            for group in groups
        ),
        sequences=len(sequences),
        collisions=index.collisions,
        block_size=groups[0].block_size,
    )


def _waste(group: CacheGroup, sequences: Collection[CacheSequence]) -> int:
    """Slots of held blocks that no sequence has computed yet; of a shared block the one that got furthest
    counts.
    """
    filled: dict[int, int] = {}
    for seq in sequences:
        first = seq.num_computed // group.block_size
        for position, block in enumerate(seq.tables[group.number][first:], first):
            if block == NO_BLOCK:
                continue
            tokens = max(0, seq.num_computed - position * group.block_size)
            filled[block] = max(filled.get(block, 0), tokens)
    return sum(group.block_size - tokens for block, tokens in filled.items() if group.nodes[block] is None)
