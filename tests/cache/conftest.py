from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache

BLOCK = 4


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def layout(window: int | None = None, block_size: int = BLOCK, head_dim: int = 2) -> BlockLayout:
    return BlockLayout(LayerGroup((0, 1), 1, head_dim, window), format_named("fp32"), block_size)


MakeCache = Callable[..., KVCache]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_cache(clock: FakeClock) -> MakeCache:
    def make(
        *blocks: int, windows: tuple[int | None, ...] = (None,), max_chunk: int = 64, **settings: object
    ) -> KVCache:
        return KVCache(
            [layout(window) for window in windows],
            list(blocks),
            fingerprint=b"m" * 32,
            device="cpu",
            max_chunk=max_chunk,
            clock=clock,
            **settings,  # type: ignore[arg-type]
        )

    return make
