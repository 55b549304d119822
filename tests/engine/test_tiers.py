"""Blocks come back from below the pool, and answers are what they would have been without."""

from __future__ import annotations

from functools import cache

import pytest
from faulty_tier import FaultyTier
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import FakeClock, Toy, make_toy

from kvstrata import RequestOptions, SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.engine.outputs import RequestOutput
from kvstrata.tiers.ram import RamTier
from kvstrata.tiers.tier import Address, StoreContext, Tier

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WINDOWS = [(None,), (None, 6), (3, 9), (5,)]


def ram(size: int = 8 << 20):  # type: ignore[no-untyped-def]
    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        return [RamTier(context, size, clock=clock)]

    return make


def ask(toy: Toy, name: str, prompt: list[int], options: RequestOptions | None = None) -> RequestOutput:
    toy.engine.add_request(name, prompt, GREEDY, options=options)
    return toy.run()[name]


def prompt_of(start: int, length: int) -> list[int]:
    return [1 + (start * 7 + i * 3) % 90 for i in range(length)]


@cache
def alone(start: int, length: int, windows: tuple[int | None, ...]) -> list[int]:
    toy = make_toy(blocks=256, windows=windows, token_budget=256)
    return ask(toy, "alone", prompt_of(start, length)).outputs[0].token_ids


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", [BLOCK + 1, 3 * BLOCK, 40, 63])
def test_a_prompt_that_left_the_pool_comes_back_from_ram(
    windows: tuple[int | None, ...], length: int
) -> None:
    toy = make_toy(windows=windows, tiers=ram())
    first = ask(toy, "first", prompt_of(1, length))
    toy.settle()
    toy.engine.reset_cache()
    computed = toy.model.tokens_computed
    second = ask(toy, "second", prompt_of(1, length))
    assert second.outputs[0].token_ids == first.outputs[0].token_ids == alone(1, length, windows)
    hit = (length - 1) // BLOCK * BLOCK
    assert second.usage.cached_by_source["ram"] == hit == second.usage.cached_tokens
    assert toy.model.tokens_computed - computed == length - hit + GREEDY.max_tokens - 1
    [load] = second.timings.loads
    assert (load.tier, load.bytes > 0, load.blocks > 0) == ("ram", True, True)
    toy.assert_idle()


@pytest.mark.parametrize("windows", WINDOWS)
def test_the_pool_s_part_of_a_prompt_is_not_loaded_again(windows: tuple[int | None, ...]) -> None:
    toy = make_toy(windows=windows, tiers=ram())
    ask(toy, "long", prompt_of(1, 41))
    toy.settle()
    toy.engine.reset_cache()
    ask(toy, "short", prompt_of(1, 17))
    again = ask(toy, "again", prompt_of(1, 41))
    assert again.usage.cached_by_source["pool"] >= 16
    assert again.usage.cached_by_source["pool"] + again.usage.cached_by_source["ram"] == 40
    assert again.outputs[0].token_ids == alone(1, 41, windows)


def test_what_is_loaded_is_found_in_the_pool_after_that() -> None:
    toy = make_toy(tiers=ram())
    ask(toy, "a", prompt_of(1, 33))
    toy.settle()
    toy.engine.reset_cache()
    ask(toy, "b", prompt_of(1, 33))
    third = ask(toy, "c", prompt_of(1, 33))
    assert third.usage.cached_by_source["pool"] == 32
    assert third.timings.loads == ()


def test_evicted_blocks_of_many_prompts_come_back() -> None:
    toy = make_toy(blocks=12, tiers=ram(), max_num_seqs=2)
    for number in range(8):
        ask(toy, f"first {number}", prompt_of(number, 29))
    toy.settle()
    computed = toy.model.tokens_computed
    for number in range(8):
        result = ask(toy, f"second {number}", prompt_of(number, 29))
        assert result.outputs[0].token_ids == alone(number, 29, (None,))
        assert result.usage.cached_tokens == 28
    assert toy.model.tokens_computed - computed <= 8 * (1 + GREEDY.max_tokens)


def test_tiers_are_emptied_with_the_pool_where_that_is_asked_for() -> None:
    toy = make_toy(tiers=ram())
    ask(toy, "first", prompt_of(1, 40))
    assert toy.engine.reset_cache(tiers=True) == []
    assert ask(toy, "second", prompt_of(1, 40)).usage.cached_tokens == 0
    toy.settle()
    toy.engine.reset_cache()
    assert ask(toy, "third", prompt_of(1, 40)).usage.cached_by_source["ram"] == 36


def test_mode_never_loads_nothing_and_says_so() -> None:
    toy = make_toy(tiers=ram(), load_mode="never")
    ask(toy, "a", prompt_of(1, 33))
    toy.settle()
    toy.engine.reset_cache()
    result = ask(toy, "b", prompt_of(1, 33))
    assert result.usage.cached_tokens == 0
    assert result.timings.loads == ()


def test_salts_do_not_meet_below_the_pool() -> None:
    toy = make_toy(tiers=ram())
    ask(toy, "a", prompt_of(1, 33), RequestOptions(cache_salt="a"))
    toy.settle()
    toy.engine.reset_cache()
    other = ask(toy, "b", prompt_of(1, 33), RequestOptions(cache_salt="b"))
    assert other.usage.cached_tokens == 0
    assert other.timings.recomputed == {"absent": 32}


def test_a_follower_waits_for_the_leader_s_load() -> None:
    toy = make_toy(tiers=ram())
    ask(toy, "a", prompt_of(1, 33))
    toy.settle()
    toy.engine.reset_cache()
    computed = toy.model.tokens_computed
    for name in ("leader", "follower"):
        toy.engine.add_request(name, prompt_of(1, 33), GREEDY)
    results = toy.run()
    assert results["follower"].outputs[0].token_ids == alone(1, 33, (None,))
    assert results["follower"].usage.cached_by_source["shared"] == 32
    assert toy.model.tokens_computed - computed == 2 * GREEDY.max_tokens


def test_deadlines_go_down_and_come_back() -> None:
    toy = make_toy(tiers=ram())
    ask(toy, "a", prompt_of(1, 33), RequestOptions(ttl=100.0))
    toy.settle()
    toy.engine.reset_cache()
    toy.clock.now = 60.0
    assert ask(toy, "b", prompt_of(1, 33)).usage.cached_by_source["ram"] == 32
    toy.clock.now = 101.0
    late = ask(toy, "c", prompt_of(1, 33))
    assert late.usage.cached_tokens == 0
    assert late.outputs[0].token_ids == alone(1, 33, (None,))


def test_a_full_queue_drops_stores_and_dirty_blocks_go_last() -> None:
    tiers: list[FaultyTier] = []

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        tiers.append(FaultyTier(context, clock))
        tiers[0].gate.clear()
        return [tiers[0]]

    toy = make_toy(blocks=64, tiers=make, queue_bytes=4 * 4096)
    ask(toy, "a", prompt_of(1, 41))
    assert toy.stack is not None
    assert toy.engine.tiering is not None
    [stats] = toy.stack.stats()
    assert stats.queue_drops["queue_full"] >= 6
    assert toy.engine.tiering.offload.dirty >= 6
    tiers[0].gate.set()
    for _ in range(8):
        toy.stack.drain(10.0)
        toy.engine.tend()
    assert toy.engine.tiering.offload.dirty == 0
    toy.settle()
    toy.engine.reset_cache()
    assert ask(toy, "b", prompt_of(1, 41)).usage.cached_by_source["faulty"] == 40


def test_hits_in_a_lower_tier_are_promoted() -> None:
    made: list[Tier] = []

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        made.extend([RamTier(context, 8 << 20, clock=clock), FaultyTier(context, clock)])
        return made

    toy = make_toy(tiers=make)
    ask(toy, "a", prompt_of(1, 33))
    toy.settle()
    upper = made[0]
    keys = toy.cache.chain(prompt_of(1, 33), Extras()).keys
    upper.delete([Address(key, 0) for key in keys])
    toy.engine.reset_cache()
    assert ask(toy, "b", prompt_of(1, 33)).usage.cached_by_source["faulty"] == 32
    toy.settle()
    toy.engine.reset_cache()
    assert ask(toy, "c", prompt_of(1, 33)).usage.cached_by_source["ram"] == 32


def test_a_prefix_hit_often_stays_through_a_scan_of_four_pools() -> None:
    blocks = 32
    toy = make_toy(blocks=blocks, tiers=ram(2 * blocks * 4096), policy="lru")
    hot = prompt_of(1, 33)
    for number in range(50):
        toy.clock.now += 1.0
        ask(toy, f"hot {number}", hot)
    for number in range(4 * blocks // 8):
        toy.clock.now += 1.0
        ask(toy, f"scan {number}", prompt_of(100 + number, 33))
    toy.settle()
    again = ask(toy, "again", hot)
    assert again.usage.cached_tokens == 32
    assert again.outputs[0].token_ids == alone(1, 33, (None,))


def test_a_pinned_prompt_stays_and_an_unpinned_one_goes() -> None:
    toy = make_toy(blocks=16, tiers=ram(16 * 4096))
    extras = Extras()
    ask(toy, "kept", prompt_of(1, 29))
    assert toy.engine.pin(prompt_of(1, 29), extras) == 28
    for number in range(12):
        ask(toy, f"scan {number}", prompt_of(10 + number, 33))
        toy.settle()
    assert ask(toy, "again", prompt_of(1, 29)).usage.cached_tokens == 28
    assert toy.engine.unpin(prompt_of(1, 29), extras)
    toy.clock.now += 1e5
    for number in range(12):
        ask(toy, f"more {number}", prompt_of(40 + number, 33))
        toy.settle()
    assert ask(toy, "last", prompt_of(1, 29)).usage.cached_tokens < 28
    toy.assert_idle()


def test_a_pin_without_tiers_holds_the_pool_but_never_against_a_request() -> None:
    toy = make_toy(blocks=16)
    extras = Extras()
    ask(toy, "kept", prompt_of(1, 29))
    assert toy.engine.pin(prompt_of(1, 29), extras, ttl=100.0) == 28
    for number in range(6):
        ask(toy, f"scan {number}", prompt_of(10 + number, 25))
    assert ask(toy, "again", prompt_of(1, 29)).usage.cached_tokens == 28
    assert ask(toy, "big", prompt_of(60, 57)).outputs[0].finish_reason == "length"
    toy.clock.now = 101.0
    toy.step()
    toy.assert_idle()


def test_an_audit_finds_a_flipped_bit_and_removes_the_chain() -> None:
    made: list[FaultyTier] = []

    def make(context: StoreContext, clock: FakeClock) -> list[Tier]:
        made.append(FaultyTier(context, clock))
        return made

    toy = make_toy(tiers=make, audit=1.0)
    ask(toy, "a", prompt_of(1, 33))
    toy.settle()
    [address] = [a for a in made[0].stored if a.key == toy.cache.chain(prompt_of(1, 33), Extras()).keys[4]]
    toy.engine.reset_cache()
    made[0].flipped = {address}
    ask(toy, "b", prompt_of(1, 33))
    assert toy.engine.tiering is not None
    while toy.engine.tend():
        toy.cache.check_integrity()
    counts = toy.engine.tiering.audit.counts
    assert (counts.mismatches, counts.checked) == (1, 5)
    made[0].flipped = set()
    toy.settle()
    after = ask(toy, "c", prompt_of(1, 33))
    assert after.usage.cached_tokens == 16
    assert after.outputs[0].token_ids == alone(1, 33, (None,))
    toy.assert_idle()


plans = st.lists(
    st.tuples(
        st.integers(0, 4),  # which prefix
        st.integers(1, 40),  # its tokens
        st.integers(1, 12),  # own tokens
        st.integers(0, 3),  # steps before the next
        st.sampled_from([1, 1, 2]),  # answers
        st.integers(-1, 1),  # priority
        st.one_of(st.none(), st.none(), st.integers(0, 4)),  # steps until it is aborted
    ),
    min_size=1,
    max_size=12,
)


@given(
    plan=plans,
    blocks=st.sampled_from([12, 20, 60]),
    slots=st.sampled_from([4, 20, 400]),
    queue=st.sampled_from([2, 64]),
    budget=st.sampled_from([5, 64]),
    windows=st.sampled_from(WINDOWS),
    mode=st.sampled_from(["auto", "always"]),
)
@settings(max_examples=60, deadline=None)
def test_random_requests_over_a_tiny_pool_and_tier(  # type: ignore[no-untyped-def]
    *, plan, blocks, slots, queue, budget, windows, mode
) -> None:
    groups = len(windows)
    toy = make_toy(
        blocks=blocks,
        windows=windows,
        token_budget=budget,
        tiers=ram(slots * 4096 * groups),
        queue_bytes=queue * 4096 * groups,
        load_mode=mode,
    )
    results: dict[str, RequestOutput] = {}
    asked = []
    aborts: dict[str, int] = {}

    for number, (which, shared, own, pause, n, priority, abort) in enumerate(plan):
        prompt = [*prompt_of(which, shared), *(91 + (number + i) % 4 for i in range(own))][:40]
        params = SamplingParams(n=n, seed=number, max_tokens=6, ignore_eos=True)
        asked.append((prompt, params))
        options = RequestOptions(priority=priority)
        toy.engine.add_request(str(number), prompt, params, options=options)
        if abort is not None:
            aborts[str(number)] = abort
        for _ in range(pause):
            results |= toy.tick(aborts)
    for _ in range(3000):
        if toy.engine.has_unfinished:
            results |= toy.tick(aborts)
    for number, (prompt, params) in enumerate(asked):
        alone = make_toy(blocks=256, windows=windows, token_budget=256)
        alone.engine.add_request("x", prompt, params)
        expected = alone.run()["x"]
        for output in results[str(number)].outputs:
            tokens = expected.outputs[output.index].token_ids
            assert output.token_ids == (
                tokens[: len(output.token_ids)] if output.finish_reason == "abort" else tokens
            )
    toy.settle()
    toy.step()
    toy.assert_idle()
