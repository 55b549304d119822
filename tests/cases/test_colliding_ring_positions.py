"""Virtual nodes on the same places of a small circle: who leaves and comes back moves only its own keys."""

from __future__ import annotations

import pytest

from kvstrata.tiers.ring import Member, Ring

SERVERS = [Member(f"cache-{number}:6379") for number in range(3)]
KEYS = [number.to_bytes(8, "little") for number in range(10_000)]


def ring(members: list[Member]) -> Ring:
    return Ring(members, points=20, bits=8)


def test_points_do_collide():
    whole = ring(SERVERS)
    assert len(set(whole._positions)) < len(whole._positions)


@pytest.mark.parametrize("gone", SERVERS, ids=lambda member: member.name)
def test_only_the_removed_servers_keys_move_and_all_come_back(gone: Member):
    before = {key: ring(SERVERS).owner(key) for key in KEYS}
    left = [member for member in SERVERS if member != gone]
    without, again = ring(left), ring([*left, gone])
    for key in KEYS:
        if before[key] == gone.name:
            assert without.owner(key) != gone.name
        else:
            assert without.owner(key) == before[key]
        assert again.owner(key) == before[key]
