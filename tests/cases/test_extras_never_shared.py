"""The same prompt under another salt or adapter is other content; under the same ones it is shared."""

from __future__ import annotations

import itertools

import pytest

from kvstrata.cache.formats import format_named
from kvstrata.cache.keys import Extras
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache

PROMPT = list(range(12))
ALL_EXTRAS = [
    Extras(),
    Extras(salt="x"),
    Extras(adapter="x"),
    Extras("ab", "c"),
    Extras("a", "bc"),
    Extras("abc"),
]


@pytest.fixture
def cache() -> KVCache:
    layout = BlockLayout(LayerGroup((0,), 1, 2), format_named("fp32"), 4)
    return KVCache([layout], [32], fingerprint=b"model", device="cpu", max_chunk=64)


def compute(cache: KVCache, extras: Extras) -> int:
    chain = cache.chain(PROMPT, extras)
    hit = cache.match(chain, len(PROMPT))
    seq = cache.open(chain, hit, len(PROMPT))
    assert seq is not None
    assert cache.grow(seq, len(PROMPT))
    cache.commit(seq, len(PROMPT))
    cache.release(seq)
    cache.check_integrity()
    return hit


def test_different_extras_are_never_shared(cache: KVCache) -> None:
    assert [compute(cache, extras) for extras in ALL_EXTRAS] == [0] * len(ALL_EXTRAS)
    keys = [set(cache.chain(PROMPT, extras).keys) for extras in ALL_EXTRAS]
    assert not any(one & other for one, other in itertools.combinations(keys, 2))


@pytest.mark.parametrize("extras", ALL_EXTRAS)
def test_same_extras_are_shared(cache: KVCache, extras: Extras) -> None:
    assert compute(cache, extras) == 0
    assert compute(cache, extras) == len(PROMPT)
