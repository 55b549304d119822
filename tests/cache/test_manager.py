from __future__ import annotations

import sys

import pytest
from driving import append, assert_true_content, compute, finish, hit, start, write
from small import FakeClock, MakeCache, layout

from kvstrata.cache.keys import Extras
from kvstrata.cache.manager import KVCache
from kvstrata.errors import ConfigError, IntegrityError

A = list(range(100, 112))  # three blocks of four
B = list(range(200, 212))


def test_released_prompt_is_found_in_whole_blocks_up_to_the_limit(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    finish(cache, [*A, 7])
    chain = cache.chain([*A, 7], Extras())
    assert [cache.match(chain, limit) for limit in (13, 12, 11, 4, 3, 0, -1)] == [12, 12, 8, 4, 0, 0, 0]
    assert hit(cache, [*A[:8], 1, 2, 3, 4]) == 8
    assert hit(cache, [1, *A[1:]]) == 0


def test_match_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    finish(cache, A)
    before = cache.stats()
    assert hit(cache, A) == 12
    assert cache.stats() == before


def test_hit_shares_blocks_with_a_running_sequence(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    first = start(cache, A)
    assert first is not None
    compute(cache, first, 12)
    second = start(cache, [*A, 1])
    assert second is not None
    assert second.seq.num_computed == 12
    assert second.seq.tables[0] == first.seq.tables[0]
    cache.release(first.seq)
    assert_true_content(cache, second)
    cache.check_integrity()


def test_content_there_already_is_taken_and_the_own_block_given_up(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    runs = [start(cache, A), start(cache, A)]
    for run in runs:
        assert run is not None
        compute(cache, run, 12)
    first, second = runs
    assert first is not None
    assert second is not None
    assert second.seq.tables[0] == first.seq.tables[0]
    assert (cache.stats().groups[0].merged, cache.stats().groups[0].free) == (3, 5)
    cache.check_integrity()


def test_growth_within_the_reservation_never_fails(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    small = start(cache, A[:4], reserve=16)
    other = start(cache, B[:4], reserve=8)
    assert small is not None
    assert other is not None
    assert not cache.grow(other.seq, 12), "took a block that was promised to another"
    assert cache.grow(other.seq, 8)
    assert cache.grow(small.seq, 16)
    cache.check_integrity()


def test_open_counts_the_hit_it_takes_out_of_what_can_be_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    finish(cache, A)
    chain = cache.chain([*A, *B], Extras())
    before = cache.stats()
    assert cache.match(chain, 23) == 12
    assert cache.open(chain, 12, 20) is None
    assert cache.stats() == before
    seq = cache.open(chain, 12, 16)
    assert seq is not None
    assert cache.stats().groups[0].reserved == 1
    cache.check_integrity()


def test_failed_growth_changes_nothing_in_any_group(make_cache: MakeCache) -> None:
    cache = make_cache(8, 3, windows=(None, 100), max_chunk=8)
    run = start(cache, A[:4], reserve=4)
    assert run is not None
    assert not cache.grow(run.seq, 16)
    assert run.seq.tables == ([], [])
    assert [group.free for group in cache.stats().groups] == [8, 3]
    cache.check_integrity()


def test_hit_that_is_gone_is_not_opened(make_cache: MakeCache) -> None:
    cache = make_cache(3)
    finish(cache, A)
    chain = cache.chain(A, Extras())
    assert cache.match(chain, 12) == 12
    finish(cache, B)
    assert cache.open(chain, 12, 12) is None
    assert cache.open(chain, 0, 12) is not None


def test_hit_that_was_forgotten_since_the_match_is_not_opened(make_cache: MakeCache) -> None:
    cache = make_cache(3)
    finish(cache, A)
    chain = cache.chain(A, Extras())
    assert cache.match(chain, 12) == 12
    cache.reset()
    assert cache.open(chain, 12, 12) is None


def test_release_is_idempotent_and_a_released_sequence_unusable(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    run = start(cache, A)
    assert run is not None
    compute(cache, run, 9)
    for _ in range(2):
        cache.release(run.seq)
        cache.check_integrity()
        group = cache.stats().groups[0]
        assert (group.free, group.cached, group.held) == (2, 2, 0)
    with pytest.raises(ValueError, match="was released"):
        cache.grow(run.seq, 12)


def test_forked_child_never_sees_sibling_tokens(make_cache: MakeCache) -> None:
    cache = make_cache(12)
    parent = start(cache, A[:6], reserve=12)
    assert parent is not None
    compute(cache, parent, 6)
    child = type(parent)(cache.fork(parent.seq), list(parent.tokens))
    for run, token in ((parent, 1), (child, 2), (parent, 3), (child, 4), (parent, 5), (child, 6)):
        append(run, token)
        assert compute(cache, run, len(run.tokens))
        assert_true_content(cache, parent)
        assert_true_content(cache, child)
        cache.check_integrity()
    assert cache.stats().groups[0].copies == 1
    assert parent.seq.tables[0][0] == child.seq.tables[0][0]
    assert hit(cache, child.tokens) == hit(cache, parent.tokens) == 8


def test_last_fork_standing_writes_without_a_copy(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    parent = start(cache, A[:6])
    assert parent is not None
    compute(cache, parent, 6)
    child = type(parent)(cache.fork(parent.seq), list(parent.tokens))
    cache.release(parent.seq)
    append(child, 9)
    assert compute(cache, child, 7)
    assert cache.stats().groups[0].copies == 0


def test_block_that_can_be_found_is_copied_before_a_write(make_cache: MakeCache) -> None:
    cache = make_cache(6)
    parent = start(cache, A[:6], reserve=8)
    assert parent is not None
    compute(cache, parent, 6)
    assert cache.grow(parent.seq, 8)
    child = type(parent)(cache.fork(parent.seq), list(parent.tokens))  # before the parent writes its step
    parent.tokens += A[6:8]
    parent.seq.chain.extend(A[6:8])
    write(cache, parent, 8)
    cache.release(parent.seq)
    append(child, 1)
    assert compute(cache, child, 7)  # now the only holder of a block that can be found
    again = start(cache, [*A[:8], 9])
    assert again is not None
    assert again.seq.num_computed == 8
    assert_true_content(cache, again)
    assert_true_content(cache, child)
    cache.check_integrity()


def test_fork_does_not_share_blocks_that_are_still_to_be_written(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    parent = start(cache, A[:6], reserve=16)
    assert parent is not None
    compute(cache, parent, 6)
    assert cache.grow(parent.seq, 16)
    child = cache.fork(parent.seq)
    assert child.tables[0] == parent.seq.tables[0][:2]


def test_full_block_waits_for_its_tokens_before_it_is_found(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    run = start(cache, A[:3], reserve=4)
    assert run is not None
    run.tokens.append(5)
    compute(cache, run, 4)
    assert hit(cache, [*A[:3], 5]) == 0
    run.seq.chain.extend([5])
    cache.commit(run.seq, 4)
    assert hit(cache, [*A[:3], 5]) == 4


def test_reset_forgets_all_and_running_sequences_finish_unfound(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    finish(cache, B)
    run = start(cache, [*A, 1, 2, 3, 4], reserve=16)
    assert run is not None
    compute(cache, run, 6)
    cache.reset()
    cache.check_integrity()
    assert compute(cache, run, 16)
    assert_true_content(cache, run)
    cache.check_integrity()
    assert hit(cache, A) == hit(cache, B) == 0
    cache.release(run.seq)
    assert cache.stats().groups[0].free == 8
    finish(cache, A)
    assert hit(cache, A) == 12


def test_content_expires_in_a_half_empty_pool(make_cache: MakeCache, clock: FakeClock) -> None:
    cache = make_cache(8, policy="ttl", ttl=10.0)
    finish(cache, A)
    clock.seconds = 9.0
    assert hit(cache, A) == 12
    finish(cache, [*A, 1, 2, 3, 4])  # a hit does not put off expiry
    clock.seconds = 10.5
    assert hit(cache, A) == 0, "expired content was served before anyone dropped it"
    assert cache.stats().groups[0].cached == 4
    assert cache.expire() == 4
    cache.check_integrity()
    assert cache.stats().groups[0].free == 8


def test_expiry_under_a_running_sequence_leaves_it_its_blocks(
    make_cache: MakeCache, clock: FakeClock
) -> None:
    cache = make_cache(8)
    run = start(cache, A, ttl=5.0, reserve=16)
    assert run is not None
    compute(cache, run, 12)
    clock.seconds = 6.0
    assert cache.expire() == 3
    fresh = finish(cache, A[:8])
    assert fresh is not None
    assert hit(cache, A) == 8, "fresh content of the same tokens could not be found"
    run.tokens += [1, 2]
    assert compute(cache, run, 14)
    assert_true_content(cache, run)
    cache.release(run.seq)
    cache.check_integrity()


def test_ttl_of_a_sequence_goes_before_that_of_the_cache(make_cache: MakeCache, clock: FakeClock) -> None:
    cache = make_cache(8, ttl=100.0)
    finish(cache, A, ttl=5.0)
    finish(cache, B)
    clock.seconds = 50.0
    assert (hit(cache, A), hit(cache, B)) == (0, 12)


def victims_of_one_script(cache: KVCache, clock: FakeClock) -> str:
    """Publish four prompts of one block, use three again; returns their names in the order of eviction."""
    prompts = {name: [token] * 4 for token, name in enumerate("abcd")}
    for name, ttl in (("a", 40.0), ("b", 30.0), ("c", 50.0), ("d", 20.0)):
        clock.seconds += 1.0
        finish(cache, prompts[name], ttl=ttl)
    for name in "adb":
        assert finish(cache, [*prompts[name], 9]) is not None
    order, fillers = "", 0
    while len(order) < len(prompts):
        filler = start(cache, [50 + fillers] * 4)
        assert filler is not None
        assert compute(cache, filler, 4)
        fillers += 1
        order += "".join(name for name in prompts if name not in order and not hit(cache, prompts[name]))
    assert fillers == 5, "the first filler takes the free block, each other one victim"
    return order


@pytest.mark.parametrize(("policy", "order"), [("lru", "cadb"), ("fifo", "abcd"), ("ttl", "dbac")])
def test_same_requests_give_the_same_victims(
    make_cache: MakeCache, clock: FakeClock, policy: str, order: str
) -> None:
    for _ in range(2):
        clock.seconds = 0.0
        assert victims_of_one_script(make_cache(5, policy=policy, ttl=60.0), clock) == order


@pytest.mark.parametrize("policy", ["lru", "lrfu", "fifo", "ttl"])
def test_tail_is_evicted_before_head(make_cache: MakeCache, clock: FakeClock, policy: str) -> None:
    cache = make_cache(4, policy=policy, ttl=60.0)
    run = start(cache, A)
    assert run is not None
    for num_tokens in (4, 8, 12):  # so that the head was published first and would expire first
        clock.seconds += 1.0
        compute(cache, run, num_tokens)
    cache.release(run.seq)
    for expected, filler in ((12, 1), (8, 2), (4, 3), (0, 4)):
        run = start(cache, [filler] * 4)
        assert run is not None
        compute(cache, run, 4)
        assert hit(cache, A) == expected
        cache.check_integrity()


def test_least_recently_released_chain_goes_first_even_if_the_clock_stands_still(
    make_cache: MakeCache,
) -> None:
    cache = make_cache(6)
    finish(cache, A)
    finish(cache, B)
    run = start(cache, [1] * 12)
    assert run is not None
    for num_tokens, left in ((4, 8), (8, 4), (12, 0)):
        compute(cache, run, num_tokens)
        assert (hit(cache, A), hit(cache, B)) == (left, 12)


def test_hooks_tell_what_is_published_and_evicted(make_cache: MakeCache) -> None:
    events: list[tuple[str, int, str]] = []
    cache = make_cache(
        3,
        on_publish=lambda key, group, block, meta: events.append(("in", meta.depth, meta.origin)),
        on_evict=lambda key, group, meta, reason: events.append(("out", meta.depth, reason)),
    )
    finish(cache, A[:8], prompt_tokens=5)
    finish(cache, B[:8])
    cache.reset()
    assert events == [
        ("in", 0, "prompt"),
        ("in", 1, "answer"),
        ("out", 1, "space"),
        ("in", 0, "prompt"),
        ("in", 1, "prompt"),
        ("out", 0, "reset"),
        ("out", 0, "reset"),
        ("out", 1, "reset"),
    ]


def test_pinned_blocks_and_those_before_them_are_not_evicted(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    finish(cache, A)
    key = cache.chain(A, Extras()).keys[1]
    blocks = cache.pin(key, 0)
    assert blocks is not None
    assert len(blocks) == 2
    assert finish(cache, B) is None
    assert finish(cache, B[:8]) is not None
    assert hit(cache, A) == 8
    cache.unpin(0, blocks)
    assert finish(cache, [*B, *B[:4]]) is not None
    assert hit(cache, A) == 0
    assert cache.pin(key, 0) is None


def test_truncate_gives_blocks_back_to_the_reservation(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    run = start(cache, A, reserve=16)
    assert run is not None
    compute(cache, run, 5)
    cache.grow(run.seq, 16)
    cache.truncate(run.seq, 6)
    assert len(run.seq.tables[0]) == 2
    assert run.seq.reserved == [2]
    cache.check_integrity()
    assert compute(cache, run, 12)
    with pytest.raises(ValueError, match="12 are computed"):
        cache.truncate(run.seq, 11)


def test_waste_counts_slots_that_hold_no_token(make_cache: MakeCache) -> None:
    cache = make_cache(8)
    run = start(cache, A[:6], reserve=6)
    assert run is not None
    cache.grow(run.seq, 6)
    assert cache.stats().groups[0].waste_slots == 8
    compute(cache, run, 6)
    fork = cache.fork(run.seq)
    assert cache.stats().groups[0].waste_slots == 2
    cache.release(fork)
    cache.release(run.seq)
    assert cache.stats().groups[0].waste_slots == 0


def test_without_prefix_caching_nothing_is_kept(make_cache: MakeCache) -> None:
    cache = make_cache(4, prefix_caching=False)
    finish(cache, A)
    assert hit(cache, A) == 0
    assert cache.stats().groups[0].free == 4


def test_capacity_is_that_of_the_tightest_group(make_cache: MakeCache) -> None:
    assert make_cache(8).capacity_tokens == 32
    assert make_cache(8, 100, windows=(None, 9)).capacity_tokens == 32
    assert make_cache(8, 5, windows=(None, 9), max_chunk=4).capacity_tokens == 32
    assert make_cache(8, 3, windows=(None, 9), max_chunk=4).capacity_tokens == 12
    assert make_cache(5, windows=(9,), max_chunk=4).capacity_tokens == sys.maxsize


def test_integrity_check_finds_a_lost_block(make_cache: MakeCache) -> None:
    cache = make_cache(4)
    run = start(cache, A)
    assert run is not None
    compute(cache, run, 12)
    run.seq.tables[0].pop()
    with pytest.raises(IntegrityError, match="block 2 counts 1 holders, 0 name it"):
        cache.check_integrity()


def test_wrong_use_is_refused(make_cache: MakeCache) -> None:
    cache, other = make_cache(4), make_cache(4)
    chain = cache.chain(A, Extras())
    with pytest.raises(ValueError, match="hit_tokens is 3"):
        cache.open(chain, 3, 12)
    run = start(cache, A)
    assert run is not None
    compute(cache, run, 8)
    for num_computed in (7, 9):
        with pytest.raises(ValueError, match=f"num_computed is {num_computed}: it can go from 8 to 8"):
            cache.commit(run.seq, num_computed)
    with pytest.raises(ValueError, match="belongs to another cache"):
        other.release(run.seq)
    with pytest.raises(ConfigError, match="ttl is 0"):
        cache.open(chain, 0, 12, ttl=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "mru"}, "'mru' is unknown"),
        ({"policy": "ttl"}, "'ttl' needs ttl"),
        ({"ttl": -1.0}, "ttl is -1"),
        ({"max_chunk": 0}, "max_chunk is 0"),
        ({"digest_bytes": 33}, "digest_bytes is 33"),
    ],
)
def test_wrong_settings_are_refused(make_cache: MakeCache, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cache(4, **settings)


def test_groups_of_different_block_size_are_refused() -> None:
    layouts = [layout(), layout(window=8, block_size=8)]
    with pytest.raises(ConfigError, match="block sizes are"):
        KVCache(layouts, [4, 4], fingerprint=b"m", device="cpu", max_chunk=8)
    with pytest.raises(ConfigError, match="1 pool sizes"):
        KVCache(layouts, [4], fingerprint=b"m", device="cpu", max_chunk=8)
