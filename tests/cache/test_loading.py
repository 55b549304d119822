"""Content that comes from outside: taken in place, published as far as it is there, the rest given back."""

from __future__ import annotations

import pytest
from driving import Run, assert_true_content, compute, finish, hit, mark, start
from hypothesis import given
from hypothesis import strategies as st
from small import BLOCK, FakeClock, MakeCache

from kvstrata.cache.keys import Extras, salt_of
from kvstrata.cache.manager import KVCache
from kvstrata.cache.matching import longest_run
from kvstrata.cache.retention import FULL

TOKENS = list(range(1, 30))
WINDOWS = [(None,), (None, 6), (6,), (5, 11), (None, 100)]


def place(cache: KVCache, run: Run, num_tokens: int) -> list[list[int]]:
    """Take blocks and fill them with what the tokens give, as a tier would."""
    taken = cache.place_for_load(run.seq, num_tokens)
    assert taken is not None
    cache.check_integrity()
    for pool, table, positions in zip(cache.pools, run.seq.tables, taken, strict=True):
        for position in positions:
            for slot in range(BLOCK):
                content = mark(run.salt, run.tokens, position * BLOCK + slot)
                pool.kv[table[position], :, :, :, slot] = content
    return taken


def opened(cache: KVCache) -> Run:
    run = start(cache, TOKENS)
    assert run is not None
    return run


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("known", [0, 2, 4])
def test_loaded_blocks_are_found_and_the_sequence_goes_on(
    make_cache: MakeCache, windows: tuple[int | None, ...], known: int
) -> None:
    cache = make_cache(*[20] * len(windows), windows=windows)
    if known:
        finish(cache, TOKENS[: known * BLOCK])
    run = opened(cache)
    assert run.seq.num_computed == known * BLOCK
    taken = place(cache, run, 6 * BLOCK)
    for positions, window in zip(taken, windows, strict=True):
        assert positions == [at for at in FULL.within(window).visible_blocks(6, BLOCK) if at >= known]
    cache.commit_loaded(run.seq, 6 * BLOCK)
    cache.check_integrity()
    assert_true_content(cache, run)
    assert compute(cache, run, len(TOKENS))
    assert_true_content(cache, run)
    cache.release(run.seq)
    cache.check_integrity()
    assert hit(cache, TOKENS) == 7 * BLOCK


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("came", range(7))
def test_what_did_not_come_is_given_back(
    make_cache: MakeCache, windows: tuple[int | None, ...], came: int
) -> None:
    cache = make_cache(*[20] * len(windows), windows=windows)
    run = opened(cache)
    place(cache, run, 6 * BLOCK)
    end = longest_run(
        0, 6, [FULL.within(w) for w in windows], BLOCK, lambda g, p: p < came and run.seq.tables[g][p] >= 0
    )
    cache.commit_loaded(run.seq, end * BLOCK)
    cache.check_integrity()
    assert all(len(table) == end for table in run.seq.tables)
    assert compute(cache, run, len(TOKENS))
    assert_true_content(cache, run)
    cache.release(run.seq)
    cache.check_integrity()
    stats = cache.stats().groups
    assert all(group.held == 0 and group.free + group.cached == group.total for group in stats)


def test_no_room_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    run = opened(cache)
    other = start(cache, [90, 91, 92, 93])
    assert other is None, "all is promised"
    assert cache.place_for_load(run.seq, 9 * BLOCK) is None
    cache.check_integrity()
    assert run.seq.tables == ([],)


def test_deadlines_of_loaded_content_hold(make_cache: MakeCache, clock: FakeClock) -> None:
    cache = make_cache(20)
    run = opened(cache)
    place(cache, run, 3 * BLOCK)
    cache.commit_loaded(run.seq, 3 * BLOCK, {0: 50.0, 1: 20.0, 2: 50.0})
    cache.release(run.seq)
    clock.seconds = 19.0
    assert hit(cache, TOKENS) == 3 * BLOCK
    clock.seconds = 20.0
    assert hit(cache, TOKENS) == BLOCK
    clock.seconds = 50.0
    assert hit(cache, TOKENS) == 0


def test_lengths_that_make_no_sense_are_refused(make_cache: MakeCache) -> None:
    cache = make_cache(20)
    run = opened(cache)
    with pytest.raises(ValueError, match="multiple of the block size"):
        cache.place_for_load(run.seq, 3)
    place(cache, run, 2 * BLOCK)
    cache.commit_loaded(run.seq, 2 * BLOCK)
    with pytest.raises(ValueError, match="computed already"):
        cache.commit_loaded(run.seq, BLOCK)


def test_forgotten_content_goes_with_all_after_it(make_cache: MakeCache) -> None:
    cache = make_cache(20)
    finish(cache, TOKENS)
    key = cache.chain(TOKENS, Extras()).keys[3]
    assert cache.block_of(key, 0) is not None
    assert cache.forget(key) == 4
    cache.check_integrity()
    assert cache.block_of(key, 0) is None
    assert hit(cache, TOKENS) == 3 * BLOCK
    assert cache.forget(key) == 0
    assert cache.stats().groups[0].evictions == {"wrong": 4}


def test_dirty_blocks_are_evicted_after_clean_ones(make_cache: MakeCache, clock: FakeClock) -> None:
    cache = make_cache(7)
    first, second = TOKENS[: 3 * BLOCK], [t + 50 for t in TOKENS[: 3 * BLOCK]]
    finish(cache, first)
    clock.seconds = 1.0
    finish(cache, second)
    for key in cache.chain(first, Extras()).keys:
        cache.mark_dirty(key, 0, True)
    cache.check_integrity()
    finish(cache, [t + 70 for t in TOKENS[: 3 * BLOCK]])
    assert (hit(cache, first), hit(cache, second)) == (3 * BLOCK, BLOCK)


@given(st.text(max_size=5), st.text(max_size=5))
def test_the_salt_can_be_read_from_encoded_extras(salt: str, adapter: str) -> None:
    assert salt_of(Extras(salt, adapter).encode()) == salt
