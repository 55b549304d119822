"""Warm equals cold, whatever was cached, however it was split, whoever ran beside it.

The toy model's next token is a hash of every token it sees in the pool, so equality here is to the bit.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Toy, make_toy

from kvstrata import RequestOptions, SamplingParams

BLOCK = 4


def answer_alone(
    prompt: tuple[int, ...], params: SamplingParams, windows: tuple[int | None, ...]
) -> list[list[int]]:
    return _alone(
        prompt, params.n, params.max_tokens, params.seed, temperature=params.temperature, windows=windows
    )


@cache
def _alone(  # type: ignore[no-untyped-def]
    prompt, n, max_tokens, seed, *, temperature, windows
) -> list[list[int]]:
    toy = make_toy(blocks=256, windows=windows, prefix_caching=False, token_budget=256)
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=seed, temperature=temperature, ignore_eos=True)
    toy.engine.add_request("alone", prompt, params)
    return [output.token_ids for output in toy.run()["alone"].outputs]


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("token_budget", [1, 7, 64])
@pytest.mark.parametrize("blocks", [8, 64])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_twice_the_same_prompt(
    length: int, blocks: int, token_budget: int, windows: tuple[int | None, ...]
) -> None:
    prompt = tuple(range(1, length + 1))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = answer_alone(prompt, params, windows)
    toy = make_toy(blocks=blocks, block_size=BLOCK, token_budget=token_budget, windows=windows)
    for name in ("first", "second"):
        toy.engine.add_request(name, prompt, params)
        assert [o.token_ids for o in toy.run()[name].outputs] == expected
    toy.assert_idle()


def test_turn_two_hits_every_full_block_of_turn_one_with_its_answer() -> None:
    toy = make_toy(block_size=BLOCK)
    prompt = list(range(1, 10))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    toy.engine.add_request("one", prompt, params)
    answer = toy.run()["one"].outputs[0].token_ids
    # The last token of an answer is never fed back, so its K and V are not there.
    computed = len(prompt) + len(answer) - 1
    toy.engine.add_request("two", [*prompt, *answer, 5, 6, 7], params)
    assert toy.run()["two"].usage.cached_tokens == computed // BLOCK * BLOCK


def test_requests_that_share_a_cold_prefix_compute_it_once() -> None:
    toy = make_toy(blocks=128, token_budget=8)
    prefix = list(range(1, 41))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for n in range(6):
        toy.engine.add_request(f"r{n}", [*prefix, 50 + n, 51 + n], params)
    results = toy.run()
    # 40 tokens of prefix once, then each request's own two tokens and the two answer tokens fed back.
    assert toy.model.tokens_computed == 40 + 6 * (2 + 2)
    assert sorted(r.usage.cached_by_source["shared"] for r in results.values()) == [0] + [40] * 5
    for n in range(6):
        alone = answer_alone((*prefix, 50 + n, 51 + n), params, (None,))
        assert results[f"r{n}"].outputs[0].token_ids == alone[0]


def test_followers_start_as_soon_as_the_shared_blocks_are_there() -> None:
    """The leader's own long tail is none of the followers' business."""
    toy = make_toy(blocks=128, token_budget=16)
    prefix = list(range(1, 17))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    toy.engine.add_request("leader", [*prefix, *[60 + i % 30 for i in range(100)]], params)
    toy.engine.add_request("follower", [*prefix, 90], params)
    done: list[str] = []
    while toy.engine.has_unfinished:
        done.extend(d.request_id for d in toy.step() if d.result is not None)
    assert done == ["follower", "leader"]


requests = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2]),  # which prefix
        st.integers(0, 24),  # tokens of the prefix
        st.integers(1, 6),  # own tokens
        st.integers(1, 10),  # answer
        st.sampled_from([1, 1, 1, 2, 3]),  # n
        st.integers(0, 2),  # priority
        st.booleans(),  # greedy
        st.integers(0, 8),  # steps before the next arrival
        st.one_of(st.none(), st.none(), st.integers(0, 6)),  # steps until it is aborted
    ),
    min_size=1,
    max_size=10,
)


@given(
    plan=requests,
    blocks=st.sampled_from([10, 14, 30, 100]),
    token_budget=st.sampled_from([1, 5, 7, 64]),
    policy=st.sampled_from(["lru", "lrfu", "fifo", "ttl"]),
    windows=st.sampled_from([(None,), (None, 6), (3, 9)]),
)
@settings(max_examples=150, deadline=None)
def test_random_schedules(plan, blocks, token_budget, policy, windows) -> None:  # type: ignore[no-untyped-def]
    toy = make_toy(
        blocks=blocks,
        block_size=BLOCK,
        token_budget=token_budget,
        windows=windows,
        policy=policy,
        ttl=5.0 if policy == "ttl" else None,
    )
    results = run_plan(toy, plan)
    for number, (which, shared, own, answer, n, *_, greedy, _, abort) in enumerate(plan):
        expected = answer_alone(
            prompt_of(which, shared, own, number),
            SamplingParams(n=n, max_tokens=answer, seed=number, temperature=0.0 if greedy else 1.0),
            windows,
        )
        result = results[str(number)]
        for output in result.outputs:
            alone = expected[output.index]
            if abort is None:
                assert output.token_ids == alone
            else:
                assert output.token_ids == alone[: len(output.token_ids)]
    toy.assert_idle()


def prompt_of(which: int, shared: int, own: int, number: int) -> tuple[int, ...]:
    return (
        *(1 + (which * 31 + i) % 60 for i in range(shared)),
        *(61 + (number + i) % 30 for i in range(own)),
    )


def run_plan(toy: Toy, plan) -> dict:  # type: ignore[no-untyped-def, type-arg]
    results = {}
    aborts: dict[str, int] = {}

    for number, (which, shared, own, answer, n, priority, greedy, pause, abort) in enumerate(plan):
        toy.engine.add_request(
            str(number),
            prompt_of(which, shared, own, number),
            SamplingParams(
                n=n, max_tokens=answer, seed=number, temperature=0.0 if greedy else 1.0, ignore_eos=True
            ),
            options=RequestOptions(priority=priority, user=str(which)),
        )
        if abort is not None:
            aborts[str(number)] = abort
        for _ in range(pause):
            results |= toy.tick(aborts)
    for _ in range(5000):
        if not toy.engine.has_unfinished:
            return results
        results |= toy.tick(aborts)
    raise AssertionError("the engine does not come to rest")


def test_without_prefix_caching_nobody_waits_for_a_leader() -> None:
    toy = make_toy(prefix_caching=False, token_budget=16)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for n in range(2):
        toy.engine.add_request(str(n), list(range(1, 9)), params)
    toy.step()
    assert len(toy.engine.scheduler.running) == 2
