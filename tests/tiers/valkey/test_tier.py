"""The tier on three real servers: what is stored comes back, from whoever is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from stored import CONTEXT, HIT, PAYLOAD, Time, blocks, drops, misses, payload_of, with_deadline
from valkey_servers import ValkeyServer, found, keys, until, url_of, valkey_servers

from kvstrata.tiers.open import open_tier
from kvstrata.tiers.tier import StoreContext, Tier
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings
from kvstrata.tiers.valkey.tier import ValkeyTier

Open = Callable[..., ValkeyTier]


@pytest.fixture
def opened(valkeys: list[ValkeyServer]) -> Iterator[Open]:
    """Opens tiers over the servers, closed at the end."""
    made: list[Tier] = []

    def make(context: StoreContext = CONTEXT, **options: object) -> Tier:
        made.append(open_tier(url_of(valkeys, **options), context))
        return made[-1]

    yield make  # type: ignore[misc]
    for tier in made:
        tier.close()


def test_blocks_come_back_through_another_tier(opened: Open):
    records = blocks(100)
    assert set(drops(opened(), records)) == {None}
    other = opened()
    assert all(found(other, records))
    assert misses(other, records) == [HIT] * 100
    assert not any(found(other, blocks(5, chain=9)))
    assert misses(other, blocks(5, chain=9)) == ["absent"] * 5


def test_a_segment_lies_on_one_server_and_segments_are_spread(opened: Open, valkeys: list[ValkeyServer]):
    records = [record for chain in range(6) for record in blocks(64, chain=chain)]
    tier = opened()
    drops(tier, records)
    homes: dict[bytes, set[str]] = {}
    for server in valkeys:
        for name in server.call("KEYS", "*:{*}:*.*"):  # type: ignore[attr-defined]
            homes.setdefault(name.split(b":")[2], set()).add(server.name)
    assert len(homes) == 24
    assert all(len(servers) == 1 for servers in homes.values())
    assert all(keys(server) for server in valkeys)


def test_what_is_there_already_is_not_sent_again(opened: Open, valkeys: list[ValkeyServer]):
    records = blocks(20)
    tier = opened()
    drops(tier, records)
    sent = sum(server.stored_bytes for server in tier.usage().servers)
    assert drops(tier, records) == [None] * 20
    assert (
        sum(server.stored_bytes for server in tier.usage().servers) == sent == 20 * CONTEXT.payload_bytes[0]
    )


def test_several_groups_and_large_blocks(opened: Open):
    context = StoreContext(CONTEXT.fingerprint, 16, (3 << 20, 5000))
    tier = opened(context)
    records = blocks(8, context=context) + blocks(8, context=context, group=1)
    assert set(drops(tier, records)) == {None}
    assert misses(tier, records) == [HIT] * 16


def test_a_ttl_ends_a_block_by_the_servers_clock_and_by_the_records(valkeys: list[ValkeyServer]):
    now = Time(monotonic=time.monotonic(), wall=time.time())
    settings = ValkeySettings.from_url(parse_tier_url(url_of(valkeys, ttl=60)))
    tier = ValkeyTier(settings, CONTEXT, clocks=now.clocks)
    records = with_deadline(blocks(3), now.monotonic + 100)
    drops(tier, records)
    outcomes = tier.load(
        [r.identity for r in records], [memoryview(bytearray(5000)) for _ in records]
    ).result()
    assert all(outcome.deadline == pytest.approx(now.monotonic + 60, abs=0.01) for outcome in outcomes)
    [name] = [n for s in valkeys for n in s.call("KEYS", f"*{records[0].identity.address.key.hex()}*")]  # type: ignore[attr-defined]
    left = [s.call("PTTL", name) for s in valkeys if s.call("EXISTS", name)]
    assert 0 < left[0] <= 60_000  # type: ignore[operator]
    now.pass_by(61)
    assert misses(tier, records) == ["expired"] * 3
    tier.close()


def test_extras_that_do_not_fit_a_header_are_not_stored(opened: Open):
    [record] = blocks(1, salt="s" * 2000)
    assert drops(opened(), [record]) == ["too_big"]


def test_deleted_and_cleared_blocks_are_gone_everywhere(opened: Open, valkeys: list[ValkeyServer]):
    tier = opened(replicas=2)
    records, others = blocks(40), blocks(40, chain=1)
    other_model = replace(CONTEXT, fingerprint=b"m" * 32)
    drops(tier, records + others)
    drops(opened(other_model), blocks(4, context=other_model))
    assert tier.delete([r.identity.address for r in records], [r.identity.segment for r in records]) == 40
    assert not any(found(tier, records))
    assert all(found(tier, others))
    tier.clear()
    assert not any(found(tier, others))
    assert sum(keys(server) for server in valkeys) == 4


def test_prefixes_keep_stores_apart(opened: Open):
    drops(opened(prefix="one"), blocks(4))
    assert misses(opened(prefix="two"), blocks(4)) == ["absent"] * 4


def test_signed_records_are_hits_only_by_the_same_key(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_A", "a" * 32)
    monkeypatch.setenv("KEY_B", "b" * 32)
    drops(opened(hmac="env:KEY_A"), blocks(4))
    assert misses(opened(hmac="env:KEY_A"), blocks(4)) == [HIT] * 4
    assert misses(opened(hmac="env:KEY_B"), blocks(4)) == ["signature"] * 4


def test_replicas_answer_for_a_server_that_was_killed(opened: Open, valkeys: list[ValkeyServer]):
    tier, records = opened(replicas=2), blocks(200)
    drops(tier, records)
    assert sum(keys(server) for server in valkeys) == 400
    valkeys[0].kill()
    found(tier, records)  # somebody has to notice
    assert all(found(tier, records))
    assert misses(tier, records) == [HIT] * 200


def test_a_server_that_is_back_is_given_what_it_missed(opened: Open, valkeys: list[ValkeyServer]):
    tier, early, late = opened(replicas=2), blocks(64), blocks(200, chain=1)
    drops(tier, early)
    valkeys[0].kill()
    found(tier, early)
    drops(tier, late)
    assert tier.unrepaired > 0
    valkeys[0].start()
    until(lambda: all(server.state == "closed" for server in tier.usage().servers))
    until(lambda: tier.unrepaired == 0)
    assert tier.settle(60)
    repaired = sum(server.repairs for server in tier.usage().servers)
    assert repaired == keys(valkeys[0]) > 0
    assert misses(tier, early + late) == [HIT] * 264  # what it lost is with the others
    assert tier.settle(60)
    by_name = {server.name: server for server in valkeys}
    for record in early + late:  # and was copied back from there
        name = tier.names.block(record.identity.address, record.identity.segment)
        first, second = tier.servers.nominal(record.identity.segment)
        assert by_name[first].call("EXISTS", name) == 1
        assert record in early or by_name[second].call("EXISTS", name) == 1


def test_without_replicas_a_neighbour_stands_in(opened: Open, valkeys: list[ValkeyServer]):
    tier, records = opened(), blocks(200)
    valkeys[0].kill()
    drops(tier, records)
    assert misses(tier, records) == [HIT] * 200
    valkeys[0].start()
    until(lambda: all(server.state == "closed" for server in tier.usage().servers))
    assert misses(tier, records) == [HIT] * 200


def test_all_servers_gone_is_misses_and_drops_at_once(opened: Open, valkeys: list[ValkeyServer]):
    tier, records = opened(), blocks(40)
    drops(tier, records)
    for server in valkeys:
        server.kill()
    found(tier, records)
    found(tier, records)
    assert found(tier, records) == [False] * 40
    assert misses(tier, records) == ["unavailable"] * 40
    assert drops(tier, records) == ["unavailable"] * 40
    assert {server.state for server in tier.usage().servers} <= {"open", "half-open"}
    assert not tier.available
    valkeys[1].start()
    until(lambda: tier.available)
    assert drops(tier, records) == [None] * 40


def test_a_tier_that_is_closed_misses_and_closes_twice(opened: Open):
    tier = opened()
    drops(tier, blocks(2))
    tier.close()
    tier.close()
    assert found(tier, blocks(2)) == [False, False]
    assert misses(tier, blocks(2)) == ["closed"] * 2
    assert drops(tier, blocks(2)) == ["closed"] * 2


def test_uses_in_the_pool_are_told_to_the_servers(opened: Open, valkeys: list[ValkeyServer]):
    tier, records = opened(), blocks(1)
    drops(tier, records)
    [(home, name)] = [(s, n) for s in valkeys for n in s.call("KEYS", "*:{*}:*.*")]  # type: ignore[attr-defined]
    until(lambda: home.call("OBJECT", "IDLETIME", name) >= 3)  # type: ignore[operator]
    tier.touch([records[0].identity.address], [records[0].identity.segment])
    assert tier.settle(60)
    assert home.call("OBJECT", "IDLETIME", name) < 3  # type: ignore[operator]


def test_three_servers_hold_nearly_three_times_what_one_holds():
    config = {"maxmemory": "24mb", "maxmemory-policy": "allkeys-lru"}
    context = StoreContext(CONTEXT.fingerprint, 16, (64 << 10,))
    with valkey_servers(3, config) as servers:
        held = []
        for some in (servers[:1], servers):
            for server in some:
                server.call("FLUSHALL")
            tier = open_tier(url_of(some), context)
            payload = payload_of(0, size=64 << 10)
            for chain in range(40):
                records = [replace(r, payload=payload) for r in blocks(64, chain=chain, context=context)]
                assert set(drops(tier, records)) == {None}
            held.append(sum(keys(server) for server in some))
            tier.close()
    assert held[1] >= 2.8 * held[0]


def test_a_server_tells_how_quick_it_is_and_one_that_is_gone_nothing(
    opened: Open, valkeys: list[ValkeyServer]
):
    tier = opened()
    assert [nbytes for nbytes, seconds in tier.probe() if seconds > 0] == [1, PAYLOAD]
    assert tier.usage().loads == 0
    for server in valkeys:
        server.kill()
    assert tier.probe() == []
