"""The ring: the same map everywhere, fair shares, and changes that move only what they must."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.tiers.ring import LEAST_POINTS, POINTS, Member, Ring

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "ring" / "three_servers.json"
NAMES = [number.to_bytes(8, "little") for number in range(2000)]

members = st.lists(
    st.builds(
        Member, st.from_regex(r"[a-z]{1,8}:[0-9]{4}", fullmatch=True), st.sampled_from([0.5, 1.0, 2.0])
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda member: member.name,
)


def test_the_map_is_the_one_in_the_golden_file():
    golden = json.loads(GOLDEN.read_text())
    ring = Ring([Member(name, weight) for name, weight in golden["members"]])
    found = {name: list(ring.owners(bytes.fromhex(name), 2)) for name in golden["owners"]}
    assert found == golden["owners"]


@given(members, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_neither_order_nor_repetition_of_members_matters(found: list[Member], rng: random.Random):
    shuffled = [*found, found[0]]
    rng.shuffle(shuffled)
    one, other = Ring(found, points=20), Ring(shuffled, points=20)
    assert all(one.owners(name, 3) == other.owners(name, 3) for name in NAMES[:200])


@given(members, st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_owners_are_distinct_and_the_first_is_the_owner(found: list[Member], count: int):
    ring = Ring(found, points=20)
    for name in NAMES[:100]:
        owners = ring.owners(name, count)
        assert len(owners) == len(set(owners)) == min(count, len(found))
        assert owners[0] == ring.owner(name)


@given(members.filter(lambda found: len(found) > 1))
@settings(max_examples=30, deadline=None)
def test_a_member_that_leaves_moves_only_what_was_its_own(found: list[Member]):
    whole, rest = Ring(found, points=20), Ring(found[1:], points=20)
    for name in NAMES[:300]:
        before = whole.owners(name, len(found))
        assert rest.owners(name, len(found)) == tuple(n for n in before if n != found[0].name)


def test_shares_follow_weights():
    ring = Ring([Member("a:1", 1.0), Member("b:1", 1.0), Member("c:1", 2.0)])
    held = Counter(ring.owner(number.to_bytes(8, "big")) for number in range(40_000))
    assert 0.42 < held["c:1"] / 40_000 < 0.58
    assert POINTS >= LEAST_POINTS


def test_a_fourth_server_takes_a_quarter_and_nothing_moves_between_the_others():
    three = Ring([Member(f"cache-{n}:6379") for n in range(3)])
    four = Ring([Member(f"cache-{n}:6379") for n in range(4)])
    names = [number.to_bytes(8, "big") for number in range(40_000)]
    moved = [(three.owner(name), four.owner(name)) for name in names if three.owner(name) != four.owner(name)]
    assert {after for _, after in moved} == {"cache-3:6379"}
    assert 0.21 <= len(moved) / len(names) <= 0.29


@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_ring_has_no_owner(count: int):
    assert Ring([]).owner(b"name") is None
    assert Ring([]).owners(b"name", count) == ()
