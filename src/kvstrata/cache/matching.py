"""How far a found prefix serves: the longest hit that all layer groups satisfy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.cache.group import CacheGroup
from kvstrata.cache.index import NO_BLOCK, Node
from kvstrata.cache.retention import Retention


def longest_hit(nodes: Sequence[Node], groups: Sequence[CacheGroup], retention: Retention) -> int:
    """Blocks of the longest usable prefix of `nodes` for a sequence of this retention.

    A hit needs in each group the blocks that the next token can see.
    """
    hit = len(nodes)
    bounded: list[tuple[CacheGroup, Retention]] = []
    for group in groups:
        seen = retention.within(group.window)
        if seen.is_full:
            blocks = group.blocks_of(nodes)
            if NO_BLOCK in blocks:
                hit = min(hit, blocks.index(NO_BLOCK))
        else:
            bounded.append((group, seen))
    gap = _last_gap(nodes, hit, bounded)
    while gap is not None:
        hit = gap  # every hit between the gap and here would need the missing block as well
        gap = _last_gap(nodes, hit, bounded)
    return hit


def longest_run(
    first: int,
    limit: int,
    seen: Sequence[Retention],
    block_size: int,
    has: Callable[[int, int], bool],
) -> int:
    """The longest hit of `first` to `limit` blocks where `has(group, position)` tells of those from `first`
    on, and those before are there as far as a hit of `first` needs them. seen: by group.
    """
    end = limit
    for group, retention in enumerate(seen):
        if retention.is_full:
            end = next((position for position in range(first, end) if not has(group, position)), end)
    bounded = [(group, retention) for group, retention in enumerate(seen) if not retention.is_full]
    while end > first:
        gap = max(
            (
                position
                for group, retention in bounded
                for position in retention.visible_blocks(end, block_size)
                if position >= first and not has(group, position)
            ),
            default=None,
        )
        if gap is None:
            return end
        end = gap
    return end


def _last_gap(nodes: Sequence[Node], hit: int, bounded: Sequence[tuple[CacheGroup, Retention]]) -> int | None:
    """The last block that a group lacks of what the token after `hit` blocks can see."""
    for group, seen in bounded:
        for position in reversed(list(seen.visible_blocks(hit, group.block_size))):
            if nodes[position].blocks[group.number] == NO_BLOCK:
                return position
    return None
