"""Which tokens a retention shows, and so which blocks it needs: against brute force."""

from __future__ import annotations

import hypothesis.strategies as st
from driving import append, assert_true_content, compute, finish, hit, start
from hypothesis import given
from small import MakeCache

from kvstrata.cache.keys import Extras, KeyChain, hides, salt_of
from kvstrata.cache.retention import FULL, Retention

A = list(range(100, 160))
RETENTIONS = st.one_of(
    st.just(FULL), st.builds(Retention, sinks=st.integers(0, 12), window=st.integers(1, 20))
)


def seen(retention: Retention, position: int) -> set[int]:
    window = position + 1 if retention.window is None else retention.window
    return {at for at in range(position + 1) if at > position - window or at < retention.sinks}


@given(RETENTIONS, st.integers(0, 60), st.integers(1, 7))
def test_hidden_blocks_are_those_of_which_no_later_query_sees_a_token(
    retention: Retention, position: int, size: int
) -> None:
    visible = set().union(*(seen(retention, at) for at in range(position, position + 80)))
    hidden = {
        block
        for block in range(position // size + 1)
        if not visible & set(range(block * size, (block + 1) * size))
    }
    assert set(retention.hidden_blocks(position, size)) == hidden


@given(RETENTIONS, st.integers(0, 20), st.integers(1, 7))
def test_visible_blocks_hold_all_that_the_token_after_sees(retention: Retention, end: int, size: int) -> None:
    tokens = seen(retention, end * size) - {end * size}
    blocks = list(retention.visible_blocks(end, size))
    assert blocks == sorted({at // size for at in tokens})


@given(RETENTIONS, st.integers(1, 9), st.integers(1, 7))
def test_most_blocks_bounds_what_a_step_needs(retention: Retention, chunk: int, size: int) -> None:
    most = retention.most_blocks(chunk, size)
    needed = [-(-(begin + chunk) // size) - len(retention.hidden_blocks(begin, size)) for begin in range(80)]
    assert most is None or max(needed) <= most <= max(needed) + 1


@given(RETENTIONS)
def test_up_to_unhidden_everything_is_seen(retention: Retention) -> None:
    first = next((at for at in range(60) if len(seen(retention, at)) <= at), None)
    assert retention.unhidden == first


@given(RETENTIONS, RETENTIONS, st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_keys_are_shared_up_to_where_one_of_two_retentions_hides_something(
    one: Retention, other: Retention, tokens: list[int]
) -> None:
    chains = []
    for retention in (one, other):
        chain = KeyChain(b"m" * 32, 4, Extras(salt="s", retention=retention))
        for token in tokens:  # one at a time, as an answer grows
            chain.extend([token])
        whole = KeyChain(b"m" * 32, 4, Extras(salt="s", retention=retention))
        whole.extend(tokens)
        assert whole.keys == chain.keys
        chains.append(chain)
    ends = [10 if end is None else min(10, end // 4) for end in (one.unhidden, other.unhidden)]
    shared = 10 if one == other else min(ends)
    assert [a == b for a, b in zip(chains[0].keys, chains[1].keys, strict=True)] == [
        block < shared for block in range(10)
    ]
    for chain, end in zip(chains, ends, strict=True):
        encoded = [chain.encoded_extras(block) for block in range(10)]
        assert [hides(extras) for extras in encoded] == [block >= end for block in range(10)]
        assert {salt_of(extras) for extras in encoded} == {"s"}


def test_a_hit_counts_only_if_all_that_the_next_token_sees_is_there(make_cache: MakeCache) -> None:
    retention = Retention(2, 6)
    cache = make_cache(7, max_chunk=4)
    run = start(cache, A[:40], retention=retention)
    assert run is not None
    for num_tokens in range(4, 41, 4):
        assert compute(cache, run, num_tokens)
        assert_true_content(cache, run)
        cache.check_integrity()
    cache.release(run.seq)
    # Of 10 blocks 7 fit: the first two, which are everybody's, and the last ones; blocks 2 to 4 are gone.
    assert hit(cache, A[:40], retention=retention) == 40
    assert hit(cache, A[:40], retention=FULL) == 8
    assert hit(cache, A[:20], retention=retention) == 8
    again = start(cache, A[:43], retention=retention)
    assert again is not None
    assert again.seq.num_computed == 40
    assert [block >= 0 for block in again.seq.tables[0]] == [True, *[False] * 7, True, True]
    assert_true_content(cache, again)
    assert compute(cache, again, 43)
    cache.release(again.seq)
    cache.check_integrity()


def test_what_slipped_out_of_the_held_is_evicted_before_what_a_hit_needs(make_cache: MakeCache) -> None:
    cache = make_cache(12, max_chunk=40)
    finish(cache, [7] * 8)
    run = start(cache, A[:40], retention=Retention(0, 5))
    assert run is not None
    assert compute(cache, run, 40)
    other = start(cache, [8] * 16)
    assert other is not None
    assert compute(cache, other, 16)
    assert hit(cache, [7] * 8) == 8
    assert_true_content(cache, run)
    cache.check_integrity()


def test_shared_blocks_before_a_held_one_can_be_evicted(make_cache: MakeCache) -> None:
    """The window has left the first blocks, which are everybody's, but not yet the last of them."""
    cache = make_cache(5, max_chunk=20)
    run = start(cache, A[:16], retention=Retention(0, 12), reserve=16)
    assert run is not None
    assert compute(cache, run, 16)
    assert run.seq.tables[0][0] == -1
    other = start(cache, [8] * 8)
    assert other is not None
    assert compute(cache, other, 8)
    cache.check_integrity()
    assert_true_content(cache, run)
    assert_true_content(cache, other)
    assert cache.stats().groups[0].evictions == {"space": 1}


def test_a_full_sequence_takes_over_from_where_a_retention_began_to_hide(make_cache: MakeCache) -> None:
    cache = make_cache(30, max_chunk=40)
    finish(cache, A[:40], retention=Retention(0, 16))
    assert hit(cache, A[:40]) == 16
    finish(cache, A[:40])
    assert hit(cache, A[:40]) == 40
    assert hit(cache, A[:40], retention=Retention(0, 16)) == 40
    assert hit(cache, A[:40], retention=Retention(4, 12)) == 16


def test_a_fork_keeps_the_sinks_when_the_parent_moves_on(make_cache: MakeCache) -> None:
    cache = make_cache(30, max_chunk=8)
    parent = start(cache, A[:12], reserve=40, retention=Retention(3, 6))
    assert parent is not None
    compute(cache, parent, 8)
    compute(cache, parent, 12)
    child = type(parent)(cache.fork(parent.seq), list(parent.tokens))
    for token in A[12:30]:
        append(parent, token)
    for end in (20, 28, 30):
        assert compute(cache, parent, end)
        assert_true_content(cache, parent)
        assert_true_content(cache, child)
    cache.release(parent.seq)
    append(child, 1)
    assert compute(cache, child, 13)
    assert_true_content(cache, child)
    cache.release(child.seq)
    cache.check_integrity()
