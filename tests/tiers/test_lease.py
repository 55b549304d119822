"""What a lease is called, where it is kept, and what it covers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cache.keys import SEGMENT_BLOCKS, KeyChain
from kvstrata.tiers.lease import Claim, covers, lease_of, new_owner, segment_of

BLOCKS = 40
CHAIN = KeyChain(bytes(32), 4)
CHAIN.extend(range(4 * BLOCKS))


@given(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS))
def test_a_lease_covers_its_block_and_those_after_it_in_the_segment(position: int, end: int) -> None:
    end = max(end, position + 1)
    lease = lease_of(CHAIN, position, end, new_owner())
    stop = min(end, segment_of(position) + SEGMENT_BLOCKS)
    assert [covers(lease.value, key) for key in CHAIN.keys] == [
        position <= block < stop for block in range(BLOCKS)
    ]


def test_all_leases_of_a_segment_are_kept_together() -> None:
    owner = new_owner()
    places = [lease_of(CHAIN, position, BLOCKS, owner).segment for position in range(BLOCKS)]
    assert len(set(places)) == 3
    assert all(places[n] == places[segment_of(n)] for n in range(BLOCKS))


def test_only_another_s_lease_that_covers_the_block_stands_in_the_way() -> None:
    mine, other = new_owner(), new_owner()
    ours, theirs = (lease_of(CHAIN, 3, 10, owner).value for owner in (mine, other))
    assert Claim(False, (theirs,)).held_by_another(CHAIN.keys[5], mine)
    assert not Claim(False, (theirs,)).held_by_another(CHAIN.keys[10], mine)
    assert not Claim(True, (ours,)).held_by_another(CHAIN.keys[5], mine)
    assert not Claim(True, ()).held_by_another(CHAIN.keys[5], mine)


def test_owners_differ() -> None:
    assert len({new_owner() for _ in range(100)}) == 100
