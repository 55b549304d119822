"""Engines that share a place compute a prefix once: one leads, the others load what it has stored."""

from __future__ import annotations

import pytest
from cluster import BLOCK, BUDGET, PREFIX, TOKEN_SECONDS, Cluster, alone

from kvstrata import RequestOptions
from kvstrata.cache.keys import SEGMENT_BLOCKS

SEGMENT = SEGMENT_BLOCKS * BLOCK  # tokens


@pytest.mark.parametrize("windows", [(None,), (None, 24)])
def test_a_prefix_is_computed_once_by_all_engines_together(windows: tuple[int | None, ...]) -> None:
    cluster = Cluster(4, windows)
    for n in range(32):
        cluster.ask(n % 4, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    assert cluster.computed == len(PREFIX) + 32
    for n in range(32):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone([*PREFIX, 1 + n], windows)
    assert sum(cluster.counts(n).wins for n in range(4)) == 1
    assert sum(cluster.counts(n).waits for n in range(4)) == 3
    assert sum(cluster.counts(n).avoided for n in range(4)) == 3
    assert 2 * len(PREFIX) < sum(cluster.counts(n).avoided_tokens for n in range(4)) <= 3 * len(PREFIX)
    assert not cluster.leases.names()
    for toy in cluster.toys:
        toy.assert_idle()


def test_without_leases_every_engine_computes_it() -> None:
    cluster = Cluster(2, lease=False)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    assert cluster.computed > 1.5 * len(PREFIX)


def test_a_follower_s_first_token_comes_soon_after_the_leader_s() -> None:
    cluster = Cluster(2)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    leader, follower = (cluster.results[f"r{n}"].timings.ttft for n in range(2))
    assert leader <= follower <= leader + 0.1 * len(PREFIX) * TOKEN_SECONDS


def test_prompts_with_other_tails_meet_on_what_they_share() -> None:
    shared = PREFIX[: 2 * SEGMENT + 5 * BLOCK]
    cluster = Cluster(2)
    prompts = [[*shared, *range(40 + n, 80 + n)] for n in range(2)]
    for n in range(2):
        cluster.ask(n, f"r{n}", prompts[n])
    cluster.run()
    assert cluster.computed == len(shared) + 2 * 40
    for n in range(2):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone(prompts[n])


def test_tails_behind_a_warm_prefix_do_not_wait_for_each_other() -> None:
    cluster = Cluster(2)
    warm = PREFIX[: 6 * BLOCK]
    cluster.ask(0, "warm", [*warm, 1])
    cluster.run()
    for n in range(2):
        cluster.ask(n, f"r{n}", [*warm, *range(20 + n, 60 + n)])
    cluster.run()
    assert sum(cluster.counts(n).waits for n in range(2)) == 0
    assert sum(cluster.counts(n).wins for n in range(2)) == 3


def test_salts_do_not_meet() -> None:
    cluster = Cluster(2)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1], RequestOptions(cache_salt=f"salt{n}"))
    cluster.run()
    assert cluster.computed == 2 * (len(PREFIX) + 1)
    assert sum(cluster.counts(n).waits for n in range(2)) == 0


def test_a_prompt_that_is_not_worth_a_round_trip_asks_for_no_lease() -> None:
    cluster = Cluster(1)
    election = cluster.toys[0].engine.tiering.loads.election  # type: ignore[union-attr]
    election._following._desk._round_trip = 100.0  # type: ignore[union-attr]
    cluster.ask(0, "r", [*PREFIX, 1])
    cluster.run()
    assert cluster.leases.claims == 0


def test_what_is_all_there_asks_for_no_lease() -> None:
    cluster = Cluster(2)
    cluster.ask(0, "first", [*PREFIX, 1])
    cluster.run()
    claims = cluster.leases.claims
    cluster.ask(1, "second", [*PREFIX, 2])
    cluster.run()
    assert cluster.leases.claims == claims
    assert cluster.results["second"].usage.cached_by_source["shared"] == len(PREFIX)


def test_a_follower_counts_what_it_loaded_once() -> None:
    cluster = Cluster(2)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.run()
    usage = cluster.results["r1"].usage
    assert usage.cached_tokens == usage.cached_by_source["shared"] == len(PREFIX)
    assert cluster.results["r1"].timings.recomputed == {}


def test_a_leader_that_is_slower_than_its_follower_is_not_waited_for_for_ever() -> None:
    cluster = Cluster(2)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.lead(0)
    begun = cluster.clock.now
    for _ in range(5000):
        cluster.step(1)
        cluster.clock.now += 0.01
        if cluster.toys[1].model.tokens_computed:
            break
        cluster.leases.keep()  # it is alive
    waited = cluster.clock.now - begun
    assert cluster.counts(1).timeouts == 1
    pace = cluster.toys[1].engine.tiering.loads.election.pace  # type: ignore[union-attr]
    assert waited <= pace.patience(len(PREFIX) // BLOCK) + BUDGET * TOKEN_SECONDS + 0.5
    cluster.run()
    assert cluster.results["r1"].outputs[0].token_ids == alone([*PREFIX, 2])


def test_a_follower_looks_for_all_that_is_missing_only_when_some_of_it_has_appeared() -> None:
    cluster = Cluster(2)
    for n in range(2):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.lead(0)
    cluster.follow(1)
    place, leases = cluster.place, cluster.leases
    assert place is not None
    for _ in range(10):  # it loads what the leader's first step came to
        cluster._step(1)
    cluster.clock.now += 0.04
    cluster._step(1)
    lookups, claims = place.lookups, leases.claims
    for _ in range(30):  # the leader's second step takes longer than a step does
        cluster.clock.now += 0.03
        cluster._step(1)
        leases.keep()
    assert leases.claims >= claims + 5
    assert place.lookups == lookups
    cluster.run()
    assert cluster.computed == len(PREFIX) + 2


def test_of_the_requests_of_an_engine_one_asks_for_what_all_of_them_lack() -> None:
    cluster = Cluster(1)
    for n in range(8):
        cluster.ask(0, f"r{n}", [*PREFIX, 1 + n])
    cluster.lead(0)
    assert cluster.place is not None
    assert cluster.place.lookups == 2  # one before, and one after it has the lease
    cluster.run()
    assert cluster.computed == len(PREFIX) + 8
