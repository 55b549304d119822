"""A leader that is cancelled, raises, is killed or outlives its lease: one takes over, and all finish."""

from __future__ import annotations

import threading
import time

import pytest
from cluster import BUDGET, PREFIX, TOKEN_SECONDS, Cluster, alone
from valkey_servers import ValkeyServer, url_of

from kvstrata.cache.keys import KeyChain
from kvstrata.tiers.lease import lease_of, new_owner
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.leases import ValkeyLeases
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.settings import ValkeySettings

OTHER = PREFIX[::-1]


def started(size: int = 3) -> Cluster:
    """Engines of which the first leads, and has computed a step; each has a request of another prefix too."""
    cluster = Cluster(size)
    for n in range(size):
        cluster.ask(n, f"r{n}", [*PREFIX, 1 + n])
    cluster.lead(0)
    for n in range(1, size):
        cluster.follow(n)
    assert [cluster.counts(n).wins for n in range(size)] == [1] + [0] * (size - 1)
    return cluster


def assert_taken_over(cluster: Cluster, waste: int) -> None:
    """The others have their answers, and together computed what was missing once, but for some tokens."""
    size = len(cluster.toys)
    for n in range(1, size):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone([*PREFIX, 1 + n])
    assert sum(cluster.counts(n).takeovers for n in range(1, size)) == 1
    assert sum(cluster.counts(n).timeouts for n in range(size)) == 0
    assert cluster.computed <= len(PREFIX) + size + waste


def test_cancelled() -> None:
    cluster = started()
    cluster.toys[0].engine.abort("r0")
    cluster.toys[0].engine.drain(10.0)
    begun = cluster.clock.now
    cluster.run()
    assert_taken_over(cluster, 0)
    # Nobody waits until a lease lapses.
    assert cluster.clock.now - begun <= (len(PREFIX) + BUDGET) * TOKEN_SECONDS
    assert not cluster.leases.names()


def test_raises() -> None:
    cluster = started()
    model = cluster.toys[0].model
    forward = model.forward

    def fail(batch: object) -> object:
        raise MemoryError

    model.forward = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(MemoryError):
        cluster.step(0)
    model.forward = forward  # type: ignore[method-assign]
    cluster.toys[0].engine.drain(10.0)
    cluster.run()
    assert cluster.computed == len(PREFIX) + 3
    assert sum(cluster.counts(n).wins + cluster.counts(n).takeovers for n in range(3)) == 2
    for n in range(3):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone([*PREFIX, 1 + n])


def test_killed() -> None:
    cluster = started()
    cluster.run(stopped=frozenset({0}))  # it is not heard of again
    assert_taken_over(cluster, 0)


def test_outlives_its_lease_and_comes_back() -> None:
    cluster = started()
    for _ in range(200):  # the leader hangs in a step; others go on
        cluster.round((1, 2))
        cluster.clock.now += 0.02
        if cluster.counts(1).takeovers + cluster.counts(2).takeovers:
            break
    names = cluster.leases.names()
    assert names
    cluster.run()
    assert_taken_over(cluster, 2 * BUDGET)  # the step that hung was computed by both
    assert cluster.results["r0"].outputs[0].token_ids == alone([*PREFIX, 1])
    assert not cluster.leases.names()


def test_the_place_of_the_leases_fails() -> None:
    cluster = started()
    cluster.leases.failing = True
    cluster.run()
    for n in range(3):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone([*PREFIX, 1 + n])


def test_a_claim_gets_lost_on_its_way() -> None:
    cluster = started()
    cluster.leases.keep()
    cluster.leases.failing = True
    cluster.step(0)
    for n in (1, 2):
        cluster.until(lambda n=n: cluster.step(n, 0.05) >= 0 and cluster.counts(n).unavailable > 0)  # type: ignore[misc]
    cluster.leases.failing = False
    cluster.run()
    assert sum(cluster.counts(n).unavailable for n in (1, 2)) >= 2
    assert cluster.computed == len(PREFIX) + 3
    for n in range(3):
        assert cluster.results[f"r{n}"].outputs[0].token_ids == alone([*PREFIX, 1 + n])


def test_other_keys_are_unaffected() -> None:
    cluster = started()
    cluster.ask(1, "other", [*OTHER, 5])
    cluster.run()
    assert cluster.results["other"].timings.ttft <= (len(OTHER) + BUDGET) * TOKEN_SECONDS
    assert cluster.results["r1"].outputs[0].token_ids == alone([*PREFIX, 2])
    assert cluster.computed == len(PREFIX) + 3 + len(OTHER) + 1


def test_fifty_followers_on_four_connections(valkeys: list[ValkeyServer]) -> None:
    servers = Servers(ValkeySettings.from_url(parse_tier_url(url_of(valkeys, connections=4, timeout="5s"))))
    leases = ValkeyLeases(servers, Names("test", bytes(32)))
    chains = [KeyChain(bytes(32), 4) for _ in range(2)]
    for n, chain in enumerate(chains):
        chain.extend(range(n, 64 + n))
    computing = [0, 0]
    computed = [0, 0]
    together: list[int] = []
    dead = threading.Event()

    def follow(number: int) -> None:
        prefix = number % 2
        lease = lease_of(chains[prefix], 0, 16, new_owner())
        until = time.monotonic() + 60
        while not computed[prefix] and time.monotonic() < until:
            if not leases.claim([lease], 0.3, [()])[0].won:
                time.sleep(0.005)
                continue
            if computed[prefix]:
                leases.release([lease])
                return
            if prefix == 0 and not dead.is_set():
                dead.set()
                return  # killed: its lease has to lapse
            computing[prefix] += 1
            together.append(computing[prefix])
            leases.renew([lease], 5.0)
            time.sleep(0.02)
            computing[prefix] -= 1
            computed[prefix] += 1
            leases.release([lease])

    threads = [threading.Thread(target=follow, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    servers.close()
    assert dead.is_set()
    assert computed == [1, 1]
    assert together == [1, 1]
