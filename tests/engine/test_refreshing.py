"""What expires is refreshed in time by those who find it, in the pool and in the tiers below."""

from __future__ import annotations

import pytest
from cluster import Prefill
from leased import MemoryLeases, SharedTier
from toy import FakeClock, Toy, make_toy

from kvstrata import RequestOptions, SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.engine.refreshing import _Found
from kvstrata.tiers.ram import RamTier
from kvstrata.tiers.tier import Address, StoreContext, Tier

ONE = SamplingParams(temperature=0, max_tokens=1)
PREFIX = [1 + (i * 7 + i // 11) % 90 for i in range(100)]
TTL = 60.0


def refreshing_toy(ttl: float | None = None, tier_ttl: float | None = None, **settings: object) -> Toy:
    """A toy with a RAM tier, if it has a ttl, in which a token takes a hundredth of a second."""

    def tiers(context: StoreContext, clock: FakeClock) -> list[Tier]:
        return [RamTier(context, 8 << 20, ttl=tier_ttl, clock=clock)]

    chosen: dict[str, object] = {"refresh_beta": 1.0, **settings}
    if tier_ttl is not None:
        chosen["tiers"] = tiers
    toy = make_toy(ttl=ttl, **chosen)  # type: ignore[arg-type]
    toy.engine.refreshing._seconds_per_token = lambda: 0.01
    return toy


def ask(toy: Toy, number: int, options: RequestOptions | None = None) -> int:
    """Cached tokens of a request."""
    name = f"r{number}"
    toy.engine.add_request(name, [*PREFIX, 1 + number % 90], ONE, options=options)
    return toy.run()[name].usage.cached_tokens


@pytest.mark.parametrize(("ttl", "tier_ttl"), [(TTL, None), (None, TTL), (TTL, 2 * TTL)])
def test_a_prefix_in_steady_use_never_expires(ttl: float | None, tier_ttl: float | None) -> None:
    toy = refreshing_toy(ttl, tier_ttl)
    ask(toy, 0)
    for number in range(1, 2000):
        toy.clock.now += 0.1
        assert ask(toy, number) == len(PREFIX)
    counts = toy.engine.refreshing.counts
    refreshes = counts.prolonged if tier_ttl is None else counts.republished
    assert 3 <= refreshes <= 5  # in 200 seconds
    if tier_ttl is not None:
        toy.engine.drain(10.0)
        toy.engine.reset_cache()
        assert ask(toy, 2000) == len(PREFIX)


def test_without_it_the_prefix_expires_under_those_who_use_it() -> None:
    toy = refreshing_toy(TTL, refresh_beta=0.0)
    ask(toy, 0)
    found = []
    for number in range(1, 2000):
        toy.clock.now += 0.1
        found.append(ask(toy, number))
    assert found.count(0) == 3


def test_what_nobody_uses_expires() -> None:
    toy = refreshing_toy(TTL)
    ask(toy, 0)
    toy.clock.now += TTL + 1
    assert ask(toy, 1) == 0


def test_a_request_refreshes_by_its_own_terms() -> None:
    toy = refreshing_toy(None)
    ask(toy, 0, RequestOptions(ttl=10.0))
    for number in range(1, 10):
        toy.clock.now += 1.0
        ask(toy, number, RequestOptions(ttl=10.0))
    chain = toy.cache.chain(PREFIX, Extras())
    assert toy.cache.lifetimes.earliest(chain, 25, float("inf")) <= toy.clock.now + 10.0


def test_answers_are_drawn_once_a_request() -> None:
    toy = refreshing_toy(TTL)
    ask(toy, 0)
    draws = toy.engine.refreshing._early._draws
    ask(toy, 1)
    assert toy.engine.refreshing._early._draws == draws + 1


def test_blocks_that_left_the_pool_are_computed_again_when_there_is_nothing_else_to_do() -> None:
    toy = refreshing_toy(None, TTL)
    ask(toy, 0)
    toy.engine.drain(10.0)
    toy.clock.now += TTL - 0.01
    toy.engine.add_request("r1", [*PREFIX, 2], ONE)
    toy.engine.step()
    assert toy.engine.refreshing.counts.republished == 1
    toy.engine.reset_cache()  # forgets what waits to be offered too
    chain = toy.cache.chain(PREFIX, Extras())
    addresses = [Address(key, 0) for key in chain.keys]
    refreshing = toy.engine.refreshing
    computed = toy.model.tokens_computed
    refreshing._renew(_Found(chain, 25, tuple(addresses)), None)
    while toy.engine.tend() or toy.engine.refreshing.pending:
        pass
    assert refreshing.counts.recomputed == 1
    assert toy.model.tokens_computed - computed == len(PREFIX)
    assert ask(toy, 2) == len(PREFIX)
    toy.assert_idle()


def test_of_processes_that_share_a_tier_one_stores_again() -> None:
    clock = FakeClock()
    leases = MemoryLeases(clock)
    place: list[SharedTier] = []

    def tiers(context: StoreContext, own: FakeClock) -> list[Tier]:
        if not place:
            place.append(SharedTier(context, own, leases))
            place[0].ttl = TTL  # type: ignore[attr-defined]
        return list(place)

    toys = [make_toy(tiers=tiers, clock=clock, refresh_beta=1.0) for _ in range(3)]
    for toy in toys:
        toy.engine.tiering.loads.prefill = Prefill()  # type: ignore[union-attr, assignment]
        ask(toy, 0)
        toy.engine.drain(10.0)
    clock.now += TTL - 1e-6
    for toy in toys:
        ask(toy, 1)
        toy.engine.drain(10.0)
        toy.engine.tend()
    assert sum(toy.engine.refreshing.counts.republished for toy in toys) == 1
    assert sum(toy.engine.refreshing.counts.avoided for toy in toys) == 2


def test_what_is_cached_together_does_not_expire_together() -> None:
    toy = make_toy(ttl=TTL, ttl_jitter=0.2, max_num_seqs=32, blocks=256)
    for number in range(20):
        toy.engine.add_request(f"r{number}", [1 + number] * 20, ONE)
    toy.run()
    ends = [
        toy.cache.lifetimes.earliest(toy.cache.chain([1 + number] * 20, Extras()), 5, float("inf"))
        for number in range(20)
    ]
    assert len({round(end, 3) for end in ends}) == 20
    assert all(0.8 * TTL <= end <= TTL for end in ends)


def test_the_tiers_lives_are_spread_as_the_pool_s() -> None:
    toy = refreshing_toy(None, TTL, refresh_beta=0.0, ttl_jitter=0.5, max_num_seqs=32, blocks=256)
    prompts = [[1 + number] * 20 for number in range(20)]
    for number, prompt in enumerate(prompts):
        toy.engine.add_request(f"r{number}", prompt, ONE)
    toy.run()
    toy.engine.drain(10.0)
    toy.clock.now += 0.75 * TTL
    [tier] = [handle.tier for handle in toy.stack._handles]  # type: ignore[union-attr]
    chains = [toy.cache.chain(prompt, Extras()) for prompt in prompts]
    there = [all(tier.lookup([Address(key, 0) for key in chain.keys])) for chain in chains]
    assert 0 < sum(there) < 20
