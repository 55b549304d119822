"""Leases on a real server: one owner at a time, and nobody touches another's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from valkey_servers import ValkeyServer, url_of

from kvstrata.cache.keys import KeyChain
from kvstrata.tiers.lease import Claim, Lease, lease_of, new_owner
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.errors import ServerError
from kvstrata.tiers.valkey.leases import ValkeyLeases
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.settings import ValkeySettings

FINGERPRINT = bytes(range(32))


@pytest.fixture
def servers(valkeys: list[ValkeyServer]) -> Iterator[Servers]:
    found = Servers(ValkeySettings.from_url(parse_tier_url(url_of(valkeys, timeout="1s"))))
    yield found
    found.close()


@pytest.fixture
def leases(servers: Servers) -> ValkeyLeases:
    return ValkeyLeases(servers, Names("test", FINGERPRINT))


def chain_of(first: int, blocks: int = 40) -> KeyChain:
    chain = KeyChain(FINGERPRINT, 4)
    chain.extend([first + n for n in range(4 * blocks)])
    return chain


def claim(leases: ValkeyLeases, *wanted: Lease, seconds: float = 60.0) -> list[Claim]:
    return leases.claim(wanted, seconds, [()] * len(wanted))


def test_the_first_has_it_and_the_next_sees_who(leases: ValkeyLeases) -> None:
    one, two = (lease_of(chain_of(1), 0, 40, new_owner()) for _ in range(2))
    assert one[:2] == two[:2]
    assert claim(leases, one) == [Claim(True, (one.value,))]
    assert claim(leases, two) == [Claim(False, (one.value,))]
    assert claim(leases, one) == [Claim(False, (one.value,))]


def test_of_many_at_once_one_has_it(leases: ValkeyLeases) -> None:
    outcomes: list[bool] = []

    def ask() -> None:
        outcomes.append(claim(leases, lease_of(chain_of(2), 16, 40, new_owner()))[0].won)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 19 + [True]


def test_it_is_free_when_it_was_given_back_or_its_time_is_over(leases: ValkeyLeases) -> None:
    one, two = (lease_of(chain_of(3), 0, 40, new_owner()) for _ in range(2))
    claim(leases, one)
    assert leases.release([one]) == [True]
    assert claim(leases, two, seconds=0.01)[0].won
    until = time.monotonic() + 60
    while not claim(leases, one)[0].won:
        assert time.monotonic() < until


def test_who_was_too_slow_neither_renews_nor_releases_the_next_one_s(leases: ValkeyLeases) -> None:
    slow, quick = (lease_of(chain_of(4), 0, 40, new_owner()) for _ in range(2))
    claim(leases, slow)
    leases.release([slow])
    claim(leases, quick)
    assert leases.renew([slow, quick], 60.0) == [False, True]
    assert leases.release([slow]) == [False]
    assert claim(leases, slow) == [Claim(False, (quick.value,))]


def test_renewing_prolongs(leases: ValkeyLeases, servers: Servers, valkeys: list[ValkeyServer]) -> None:
    lease = lease_of(chain_of(5), 0, 40, new_owner())
    claim(leases, lease, seconds=5.0)
    assert leases.renew([lease], 500.0) == [True]
    [name] = [key for server in valkeys for key in server.call("KEYS", "*")]  # type: ignore[attr-defined]
    [left] = [left for server in valkeys if isinstance(left := server.call("PTTL", name), int) and left > 0]
    assert left > 400_000


def test_leases_of_many_segments_go_where_their_blocks_are(
    leases: ValkeyLeases, servers: Servers, valkeys: list[ValkeyServer]
) -> None:
    chain, owner = chain_of(6, 16 * 30), new_owner()
    wanted = [lease_of(chain, position, 16 * 30, owner) for position in range(0, 16 * 30, 16)]
    assert all(outcome.won for outcome in claim(leases, *wanted))
    for server in valkeys:
        mine = [lease for lease in wanted if servers.owner(lease.segment) == server.name]
        assert len(mine) == server.call("DBSIZE") > 0
    assert leases.release(wanted) == [True] * 30
    assert [server.call("DBSIZE") for server in valkeys] == [0, 0, 0]


def test_an_earlier_lease_of_the_segment_is_seen_and_tells_what_it_covers(leases: ValkeyLeases) -> None:
    one, two = chain_of(7), chain_of(7)
    other = KeyChain(FINGERPRINT, 4)
    other.extend([*[7 + n for n in range(4 * 6)], *range(500, 560)])
    leader, follower = new_owner(), new_owner()
    claim(leases, lease_of(one, 0, 40, leader))
    [seen] = leases.claim([lease_of(two, 6, 40, follower)], 60.0, [two.keys[0:6]])
    assert seen.won
    assert seen.held_by_another(two.keys[6], follower)
    [apart] = leases.claim([lease_of(other, 6, 20, follower)], 60.0, [other.keys[0:6]])
    assert apart.won
    assert not apart.held_by_another(other.keys[6], follower)


def test_a_server_that_is_gone_is_an_error_and_not_a_lease(
    leases: ValkeyLeases, valkeys: list[ValkeyServer]
) -> None:
    for server in valkeys:
        server.kill()
    with pytest.raises(ServerError):
        claim(leases, lease_of(chain_of(8), 0, 40, new_owner()))
