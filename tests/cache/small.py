"""The small blocks and the clock in the hand of the test that the cache's tests work with."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache

BLOCK = 4

MakeCache = Callable[..., KVCache]


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def layout(window: int | None = None, block_size: int = BLOCK, head_dim: int = 2) -> BlockLayout:
    return BlockLayout(LayerGroup((0, 1), 1, head_dim, window), format_named("fp32"), block_size)
