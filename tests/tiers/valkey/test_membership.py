"""Servers that join and leave: the old owners are asked for a while, and what they had moves over."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored import CONTEXT, HIT, blocks, drops, misses
from valkey_servers import ValkeyServer, found, keys, until, url_of, valkey_servers

from kvstrata.errors import ConfigError
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings
from kvstrata.tiers.valkey.tier import ValkeyTier


def tier_over(servers: list[ValkeyServer], **options: object) -> ValkeyTier:
    tier = open_tier(url_of(servers, **options), CONTEXT)
    assert isinstance(tier, ValkeyTier)
    return tier


def names(servers: list[ValkeyServer]) -> str:
    return ",".join(server.name for server in servers)


def test_a_server_that_joins_costs_no_hit_and_gets_copies(valkeys: list[ValkeyServer]):
    tier, records = tier_over(valkeys[:2]), blocks(200)
    drops(tier, records)
    assert tier.set_servers(names(valkeys))
    assert not tier.set_servers(names(valkeys))
    assert all(found(tier, records))
    assert misses(tier, records) == [HIT] * 200
    assert tier.settle(60)
    moved = keys(valkeys[2])
    assert 0 < moved == sum(server.copies for server in tier.usage().servers)
    tier.close()
    alone = tier_over(valkeys)  # which never knew another membership
    assert misses(alone, records) == [HIT] * 200
    alone.close()


def test_a_server_that_leaves_is_asked_until_the_grace_period_is_over(valkeys: list[ValkeyServer]):
    tier, records = tier_over(valkeys, grace="1s"), blocks(200)
    drops(tier, records)
    tier.set_servers(names(valkeys[:2]))
    assert all(found(tier, records))
    until(lambda: len(tier.servers.nodes) == 2)
    there = found(tier, records)
    assert 0 < sum(there) < 200
    assert [miss is HIT for miss in misses(tier, records)] == there
    tier.close()


def test_the_file_of_members_is_read_again(valkeys: list[ValkeyServer], tmp_path: Path):
    file = tmp_path / "members"
    file.write_text(f"{valkeys[0].name}\n")
    tier = ValkeyTier(ValkeySettings.from_url(parse_tier_url(f"valkey://?members={file}")), CONTEXT)
    assert not tier.reread()
    file.write_text(f"{valkeys[0].name}\n{valkeys[1].name} 2\n")
    assert tier.reread()
    assert tier.servers.members == sorted(server.name for server in valkeys[:2])
    file.write_text("")
    with pytest.raises(ConfigError, match="members is"):
        tier.reread()
    assert len(tier.servers.members) == 2
    tier.close()


def test_a_membership_that_cannot_be_is_refused_and_changes_nothing(valkeys: list[ValkeyServer]):
    tier = tier_over(valkeys, replicas=2)
    with pytest.raises(ConfigError, match="replicas=2 needs as many"):
        tier.set_servers(valkeys[0].name)
    with pytest.raises(ConfigError, match="can be reached"):
        tier.set_servers(f"{names(valkeys)},127.0.0.1:1")
    assert len(tier.servers.members) == 3
    tier.close()


def test_a_clusters_slots_place_blocks_and_segments_stay_together():
    with valkey_servers(3, {"cluster-enabled": "yes"}) as servers:
        for number, server in enumerate(servers):
            first, end = number * 16384 // 3, (number + 1) * 16384 // 3
            assert server.call("CLUSTER", "ADDSLOTSRANGE", first, end - 1) == b"OK"
        for server in servers[1:]:
            servers[0].call("CLUSTER", "MEET", "127.0.0.1", server.port, server.bus_port)
        ready = (b"cluster_state:ok", b"cluster_known_nodes:3")
        until(lambda: all(word in s.call("CLUSTER", "INFO") for s in servers for word in ready))  # type: ignore[operator]
        with pytest.raises(ConfigError, match=r"valkey\+cluster://"):
            tier_over(servers)
        tier = open_tier(f"valkey+cluster://{servers[1].name}", CONTEXT)
        records = [record for chain in range(8) for record in blocks(40, chain=chain)]
        assert set(drops(tier, records)) == {None}
        assert all(found(tier, records))
        assert misses(tier, records) == [HIT] * 320
        assert sum(keys(server) for server in servers) == 320
        assert all(keys(server) for server in servers)
        tier.close()
