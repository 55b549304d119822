from __future__ import annotations

import pytest
from small import FakeClock, MakeCache, layout

from kvstrata.cache.manager import KVCache


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
