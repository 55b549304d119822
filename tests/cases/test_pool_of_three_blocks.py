"""X fills a pool of three blocks, Y takes one and then all, X comes again: nothing evicted is found."""

from __future__ import annotations

import pytest

from kvstrata.cache.formats import format_named
from kvstrata.cache.keys import Extras
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache
from kvstrata.cache.table import CacheSequence

X = list(range(100, 112))
Y = list(range(200, 212))


def write(cache: KVCache, seq: CacheSequence, num_tokens: int) -> None:
    assert cache.grow(seq, num_tokens)
    tokens = seq.chain.tokens
    for position in range(seq.num_computed, num_tokens):
        cache.pools[0].kv[seq.tables[0][position // 4], 0, :, 0, position % 4] = float(tokens[position])
    cache.commit(seq, num_tokens)
    cache.check_integrity()


def open_on_hit(cache: KVCache, tokens: list[int], *, limit: int) -> CacheSequence:
    chain = cache.chain(tokens, Extras())
    seq = cache.open(chain, cache.match(chain, limit), len(tokens))
    assert seq is not None
    return seq


def assert_holds(cache: KVCache, seq: CacheSequence) -> None:
    for position in range(seq.num_computed):
        block = seq.tables[0][position // 4]
        assert (cache.pools[0].kv[block, 0, :, 0, position % 4] == float(seq.chain.tokens[position])).all()


@pytest.mark.parametrize("policy", ["lru", "lrfu", "fifo", "ttl"])
@pytest.mark.parametrize(("of_y", "left_of_x"), [(4, 8), (8, 4), (12, 0)])
def test_evicted_blocks_are_not_found_and_hits_start_at_block_0(
    policy: str, of_y: int, left_of_x: int
) -> None:
    layout = BlockLayout(LayerGroup((0,), 1, 2), format_named("fp32"), 4)
    cache = KVCache([layout], [3], fingerprint=b"model", device="cpu", max_chunk=64, policy=policy, ttl=1e6)
    first = open_on_hit(cache, X, limit=12)
    write(cache, first, 12)
    cache.release(first)

    second = open_on_hit(cache, Y, limit=12)
    write(cache, second, 4)
    write(cache, second, of_y)
    cache.release(second)

    assert cache.match(cache.chain(X, Extras()), 12) == left_of_x
    again = open_on_hit(cache, X, limit=12)
    assert again.num_computed == left_of_x
    assert_holds(cache, again)
    write(cache, again, 12)
    assert_holds(cache, again)
    assert cache.match(cache.chain(Y, Extras()), 12) == 0, "X has all three blocks"
    cache.release(again)
    stats = cache.stats().groups[0]
    assert (stats.free + stats.cached, stats.held) == (3, 0)
