"""Who runs when: priority, fairness between users, short beside long, preemption and its limits."""

from __future__ import annotations

from toy import Toy, make_toy

from kvstrata import RequestOptions, SamplingParams


def add(toy: Toy, name: str, length: int, answer: int = 2, **options: object) -> None:
    prompt = [1 + (hash_of(name) + i) % 90 for i in range(length)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    toy.engine.add_request(name, prompt, params, options=RequestOptions(**options))  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    return sum(ord(c) * 7**i for i, c in enumerate(name))


def finishing_order(toy: Toy) -> list[str]:
    done: list[str] = []
    while toy.engine.has_unfinished:
        done.extend(d.request_id for d in toy.step() if d.result is not None)
    return done


def test_lower_priority_value_goes_first() -> None:
    toy = make_toy(max_num_seqs=1)
    add(toy, "later", 8, priority=1)
    add(toy, "sooner", 8, priority=-1)
    add(toy, "middle", 8)
    assert finishing_order(toy) == ["sooner", "middle", "later"]


def test_arrival_decides_between_equals() -> None:
    toy = make_toy(max_num_seqs=1)
    for name in ("a", "b", "c"):
        add(toy, name, 8)
    assert finishing_order(toy) == ["a", "b", "c"]


def test_one_users_flood_does_not_starve_another() -> None:
    toy = make_toy(max_num_seqs=1, blocks=200)
    for n in range(8):
        add(toy, f"flood{n}", 20, user="many")
    toy.step()
    add(toy, "single", 20, user="one")
    order = finishing_order(toy)
    assert order.index("single") <= 1


def test_idle_time_earns_no_credit() -> None:
    toy = make_toy(max_num_seqs=1, blocks=200)
    add(toy, "worker0", 40, user="worker")
    finishing_order(toy)
    for n in range(1, 4):
        add(toy, f"worker{n}", 20, user="worker")
        add(toy, f"newcomer{n}", 20, user="newcomer")
    order = finishing_order(toy)
    # They take turns: the newcomer does not get three in a row for having been away.
    assert {order[0][:6], order[1][:6]} == {"worker", "newcom"}
    assert {order[2][:6], order[3][:6]} == {"worker", "newcom"}


def test_a_short_prompt_starts_beside_a_long_one() -> None:
    toy = make_toy(blocks=200, token_budget=16)
    add(toy, "long", 300)
    add(toy, "short", 6)
    assert finishing_order(toy) == ["short", "long"]


def test_the_step_never_exceeds_its_budget_nor_its_sequences() -> None:
    toy = make_toy(blocks=200, token_budget=16, max_num_seqs=3)
    for n in range(9):
        add(toy, f"r{n}", 5 + 7 * n, answer=5)
    while toy.engine.has_unfinished:
        before = toy.model.tokens_computed
        toy.step()
        assert toy.model.tokens_computed - before <= 16
        assert len(toy.engine.scheduler.running) <= 3


def test_preempted_sequences_come_back_with_the_same_answer() -> None:
    names = [f"r{n}" for n in range(6)]
    tight = make_toy(blocks=12, block_size=4, token_budget=64)
    ample = make_toy(blocks=500, block_size=4, token_budget=64)
    for toy in (tight, ample):
        for name in names:
            add(toy, name, 9, answer=20)
    results = tight.run()
    expected = ample.run()
    assert sum(r.timings.preemptions for r in results.values()) > 0
    for name in names:
        assert results[name].outputs[0].token_ids == expected[name].outputs[0].token_ids
    tight.assert_idle()


def test_the_best_ranked_is_never_preempted() -> None:
    toy = make_toy(blocks=12, block_size=4, token_budget=64)
    for n in range(6):
        add(toy, f"r{n}", 9, answer=20)
    assert toy.run()["r0"].timings.preemptions == 0


def test_many_followers_of_one_leader_do_not_hold_up_others() -> None:
    toy = make_toy(blocks=300, token_budget=8, max_num_seqs=4)
    prompt = list(range(1, 60))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for n in range(10):
        toy.engine.add_request(f"same{n}", [*prompt, 60 + n], params)
    toy.engine.add_request("other", [90, 91], params)
    order = finishing_order(toy)
    assert len(order) == 11
    assert order[0] == "other"


def test_a_cold_prefix_is_computed_once_however_many_share_it() -> None:
    toy = make_toy(blocks=600, block_size=4, token_budget=16, max_num_seqs=200)
    prefix = [1 + i % 90 for i in range(400)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for n in range(90):
        toy.engine.add_request(f"r{n}", [*prefix, 1 + n], params)
    toy.run()
    assert toy.model.tokens_computed == 400 + 90
    toy.assert_idle()


def test_a_step_looks_at_few_of_those_who_wait() -> None:
    toy = make_toy(max_num_seqs=4)
    looked_at = 0
    match = toy.cache.match

    def counting(*args: object) -> int:
        nonlocal looked_at
        looked_at += 1
        return match(*args)  # type: ignore[arg-type]

    for n in range(1000):
        add(toy, f"r{n}", 3, user=f"user{n % 7}")
    toy.cache.match = counting  # type: ignore[method-assign]
    for _ in range(10):
        toy.engine.step()
    assert looked_at <= 10 * 5
