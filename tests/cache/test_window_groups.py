from __future__ import annotations

import pytest
from driving import append, assert_true_content, compute, finish, hit, start
from small import MakeCache

from kvstrata.cache.index import NO_BLOCK
from kvstrata.cache.retention import FULL

A = list(range(100, 140))  # ten blocks of four


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 100, None])
@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 40])
def test_first_visible_block_holds_the_first_visible_position(position: int, window: int | None) -> None:
    seen = [at for at in range(position + 1) if window is None or at > position - window]
    assert FULL.within(window).hidden_blocks(position, 4) == range(seen[0] // 4)


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("chunk", range(1, 10))
def test_most_blocks_bounds_what_a_step_needs(window: int, chunk: int) -> None:
    seen = FULL.within(window)
    needed = [-(-(start + chunk) // 4) - len(seen.hidden_blocks(start, 4)) for start in range(60)]
    assert max(needed) <= (seen.most_blocks(chunk, 4) or 0) <= max(needed) + 1


def test_blocks_no_query_can_see_leave_the_table_and_stay_findable(make_cache: MakeCache) -> None:
    cache = make_cache(10, 10, windows=(None, 6), max_chunk=40)
    run = start(cache, A)
    assert run is not None
    compute(cache, run, 40)
    full, window = run.seq.tables
    assert NO_BLOCK not in full
    assert window[:8] == [NO_BLOCK] * 8  # position 40 sees 35 to 40
    assert NO_BLOCK not in window[8:]
    assert cache.stats().groups[1].cached == 8
    assert hit(cache, A[:20]) == 20
    assert_true_content(cache, run)
    cache.check_integrity()


def test_long_sequence_runs_in_a_window_of_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(10, 4, windows=(None, 6), max_chunk=4)
    run = start(cache, A)
    assert run is not None
    for num_tokens in range(4, 41, 4):
        assert compute(cache, run, num_tokens)
        assert_true_content(cache, run)
        cache.check_integrity()
    assert cache.stats().groups[1].evictions["space"] == 6


def test_hit_needs_in_window_groups_only_what_the_next_token_sees(make_cache: MakeCache) -> None:
    cache = make_cache(20, 4, windows=(None, 6), max_chunk=4)
    run = start(cache, A)
    assert run is not None
    for num_tokens in range(4, 41, 4):
        compute(cache, run, num_tokens)
    cache.release(run.seq)
    assert hit(cache, A) == 40
    # the window group still has blocks 6 to 9: a hit of 32 needs 6 and 7, one of 28 needs 5
    assert [hit(cache, A[:length]) for length in (36, 32, 28, 24)] == [36, 32, 0, 0]
    again = start(cache, [*A, 1, 2])
    assert again is not None
    assert again.seq.num_computed == 40
    assert again.seq.tables[1][:8] == [NO_BLOCK] * 8
    compute(cache, again, 42)
    assert_true_content(cache, again)
    cache.check_integrity()


def test_slipped_blocks_are_evicted_before_those_a_hit_needs(make_cache: MakeCache) -> None:
    cache = make_cache(40, 11, windows=(None, 6), max_chunk=40)
    finish(cache, [7] * 8)  # released before, so least recently used
    run = start(cache, A[:32])
    assert run is not None
    compute(cache, run, 32)
    assert cache.stats().groups[1].free == 1
    other = start(cache, [8] * 12)
    assert other is not None
    compute(cache, other, 12)
    assert hit(cache, [7] * 8) == 8
    assert cache.stats().groups[1].evictions["space"] == 2
    cache.check_integrity()


def test_block_used_again_after_it_slipped_counts_as_used(make_cache: MakeCache) -> None:
    cache = make_cache(40, 20, windows=(None, 6), max_chunk=40)
    run = start(cache, A[:32])
    assert run is not None
    compute(cache, run, 32)
    finish(cache, [*A[:16], 1])
    slipped = [meta.slipped for meta in cache.groups[1].metas.values()]
    assert (
        slipped.count(True) == 5
    )  # of blocks 0 to 5; block 3 was used until the release of the second prompt
    cache.release(run.seq)
    cache.check_integrity()


def test_block_evicted_from_a_full_group_takes_its_window_block_along(make_cache: MakeCache) -> None:
    cache = make_cache(3, 9, windows=(None, 6), max_chunk=12)
    finish(cache, A[:12])
    finish(cache, [1] * 12)
    assert hit(cache, A[:12]) == 0
    full, window = cache.stats().groups
    assert full.evictions == {"space": 3}
    assert window.evictions == {"unreachable": 3}
    assert (window.free, window.cached) == (6, 3)


def test_fork_keeps_what_its_window_needs_when_the_parent_moves_on(make_cache: MakeCache) -> None:
    cache = make_cache(30, 30, windows=(None, 6), max_chunk=8)
    parent = start(cache, A[:8], reserve=40)
    assert parent is not None
    compute(cache, parent, 8)
    child = type(parent)(cache.fork(parent.seq), list(parent.tokens))
    for token in A[8:24]:
        append(parent, token)
    compute(cache, parent, 16)
    compute(cache, parent, 24)
    for token in (1, 2, 3):
        append(child, token)
        assert compute(cache, child, len(child.tokens))
        assert_true_content(cache, child)
        assert_true_content(cache, parent)
    cache.check_integrity()


def test_model_of_windows_alone_finds_its_blocks(make_cache: MakeCache) -> None:
    cache = make_cache(8, windows=(6,), max_chunk=16)
    run = start(cache, A[:24])
    assert run is not None
    for num_tokens in (16, 24):
        assert compute(cache, run, num_tokens)
    cache.release(run.seq)
    assert hit(cache, A[:24]) == 24
    again = start(cache, A[:30])
    assert again is not None
    compute(cache, again, 30)
    assert_true_content(cache, again)
    cache.check_integrity()
