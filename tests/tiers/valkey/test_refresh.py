"""Values on servers live longer when stored again towards their end, and leases can be switched off."""

from __future__ import annotations

import pytest
from stored import CONTEXT, blocks, drops
from valkey_servers import ValkeyServer, url_of

from kvstrata.errors import ConfigError
from kvstrata.tiers.open import check_tier_url, open_tier
from kvstrata.tiers.stack import TierStack


def lives(servers: list[ValkeyServer]) -> list[int]:
    """Milliseconds that each value has left."""
    return [
        int(str(server.call("PTTL", name)))
        for server in servers
        for name in server.call("KEYS", "*.*")  # type: ignore[attr-defined]
    ]


def test_a_value_with_less_than_half_of_its_life_left_is_stored_anew(valkeys: list[ValkeyServer]) -> None:
    tier = open_tier(url_of(valkeys, ttl="100s"), CONTEXT)
    records = blocks(20)
    drops(tier, records)
    for left, least in ((60_000, 0), (40_000, 80_000)):
        for server in valkeys:
            for name in server.call("KEYS", "*.*"):  # type: ignore[attr-defined]
                server.call("PEXPIRE", name, left)
        assert drops(tier, records) == [None] * 20
        assert len(lives(valkeys)) == 20
        assert all(life > least for life in lives(valkeys))
        assert all(life <= (left if least == 0 else 100_000) for life in lives(valkeys))
    tier.close()


def test_a_value_without_end_is_left_alone(valkeys: list[ValkeyServer]) -> None:
    eternal, mortal = (open_tier(url_of(valkeys, **o), CONTEXT) for o in ({}, {"ttl": "100s"}))
    drops(eternal, blocks(5))
    drops(mortal, blocks(5))
    assert lives(valkeys) == [-1] * 5
    drops(mortal, blocks(5, chain=1))
    drops(eternal, blocks(5, chain=1))
    assert lives(valkeys) == [-1] * 10
    eternal.close()
    mortal.close()


@pytest.mark.parametrize(("option", "kept"), [({}, True), ({"lease": "on"}, True), ({"lease": "off"}, False)])
def test_leases_are_kept_unless_they_are_switched_off(
    valkeys: list[ValkeyServer], option: dict[str, str], kept: bool
) -> None:
    stack = TierStack([open_tier(url_of(valkeys, **option), CONTEXT)], CONTEXT)
    assert (stack.leases is not None) is kept
    stack.close()


def test_anything_else_than_on_or_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="lease is 'maybe'; give on or off"):
        check_tier_url("valkey://127.0.0.1?lease=maybe")
