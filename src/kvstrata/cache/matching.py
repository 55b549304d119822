"""How far a found prefix serves: the longest hit that all layer groups satisfy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.cache.group import CacheGroup
from kvstrata.cache.index import NO_BLOCK, Node
from kvstrata.cache.window import first_visible_block


def longest_hit(nodes: Sequence[Node], groups: Sequence[CacheGroup]) -> int:
    """Blocks of the longest usable prefix of `nodes`.

    A full-attention group needs all blocks up to there, a window group those that the next token can see.
    """
    hit = len(nodes)
    for group in groups:
        if group.window is None:
            blocks = [node.blocks[group.number] for node in nodes]
            if NO_BLOCK in blocks:
                hit = min(hit, blocks.index(NO_BLOCK))
    windows = [group for group in groups if group.window is not None]
    gap = _last_gap(nodes, hit, windows)
    while gap is not None:
        hit = gap  # every hit between the gap and here would need the missing block as well
        gap = _last_gap(nodes, hit, windows)
    return hit


def longest_run(
    first: int,
    limit: int,
    windows: Sequence[int | None],
    block_size: int,
    has: Callable[[int, int], bool],
) -> int:
    """The longest hit of `first` to `limit` blocks where `has(group, position)` tells of those from `first`
    on, and those before are there as far as a hit of `first` needs them.
    """
    end = limit
    for group, window in enumerate(windows):
        if window is None:
            end = next((position for position in range(first, end) if not has(group, position)), end)
    while end > first:
        gap = max(
            (
                position
                for group, window in enumerate(windows)
                for position in range(
                    max(first, first_visible_block(end * block_size, window, block_size)), end
                )
                if window is not None and not has(group, position)
            ),
            default=None,
        )
        if gap is None:
            return end
        end = gap
    return end


def _last_gap(nodes: Sequence[Node], hit: int, windows: Sequence[CacheGroup]) -> int | None:
    """The last block that a window group lacks of what the token after `hit` blocks can see."""
    for group in windows:
        first = first_visible_block(hit * group.block_size, group.window, group.block_size)
        for position in range(hit - 1, first - 1, -1):
            if nodes[position].blocks[group.number] == NO_BLOCK:
                return position
    return None
