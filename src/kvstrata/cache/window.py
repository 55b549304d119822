"""Which blocks a sliding window needs: the arithmetic that match, growth and slipping share."""

from __future__ import annotations


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """The first block that a query at `position` or later sees: it sees positions `position - window + 1`
    on.
    """
    if window is None:
        return 0
    return max(0, position - window + 1) // block_size


def most_blocks(window: int, max_chunk: int, block_size: int) -> int:
    """Most blocks of one sequence alive at once when it computes at most `max_chunk` tokens a step."""
    return -(-(window - 1 + max_chunk) // block_size) + 1
