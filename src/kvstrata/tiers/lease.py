"""Leases: which process computes a segment of a prompt that no store has yet.

A segment is 16 blocks of a chain, at fixed positions. Who lacks a block of it asks for the lease of that
block in a store that all processes see: set if absent, for a short time. The value is the owner's random
id, and a tag of each block that it is going to compute, from that one to the segment's end, so that others
can tell whether what they lack is among them or behind a tail of another prompt. Renewing and releasing
compare the value first: an owner that was too slow does no harm to the next. Records are named by their
content, so two owners at a time are waste and never an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstrata.cache.keys import SEGMENT_BLOCKS, KeyChain

OWNER_BYTES = 16
TAG_BYTES = 4


class Lease(NamedTuple):
    """segment: name of its segment, with whose blocks it is kept. name: key of the first block that it
    covers. value: the owner's id and tags, see `covers`.
    """

    segment: bytes
    name: bytes
    value: bytes


class Claim(NamedTuple):
    """What came of asking for a lease. holders: values of it, where another has it, and of those watched.
    stored: whether the first block that it covers was there by then, as far as a glance tells.
    """

    won: bool
    holders: tuple[bytes, ...]
    stored: bool = False

    def held_by_another(self, key: bytes, owner: bytes) -> bool:
        """Whether somebody else is going to compute the block of a key."""
        return any(value[:OWNER_BYTES] != owner and covers(value, key) for value in self.holders)


class LeaseStore(Protocol):
    """Where leases are kept. Calls block for about a round trip; what fails is not won, renewed or there.

    Each call is one pipelined request to each server that it concerns.
    """

    def claim(
        self, leases: Sequence[Lease], seconds: float, watched: Sequence[Sequence[bytes]]
    ) -> list[Claim]:
        """Take those that nobody has, for so many seconds. watched: other names in each lease's segment that
        are read after it. Raises an exception where the store cannot be asked.
        """

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[bool]:
        """Keep those that are still ours for so many seconds from now; false for those that are not."""

    def release(self, leases: Sequence[Lease]) -> list[bool]:
        """Give back those that are still ours; false for those that are not."""


def new_owner() -> bytes:
    """An id that no other owner has."""
    return secrets.token_bytes(OWNER_BYTES)


def segment_of(position: int) -> int:
    """Position of the first block of the segment that a block position is in."""
    return position - position % SEGMENT_BLOCKS


def lease_of(chain: KeyChain, position: int, end: int, owner: bytes) -> Lease:
    """The lease of a chain's blocks from `position` to the end of its segment, or to `end`."""
    covered = chain.keys[position : min(end, segment_of(position) + SEGMENT_BLOCKS)]
    tags = b"".join(key[:TAG_BYTES] for key in covered)
    return Lease(chain.segment(position), chain.keys[position], owner + tags)


def covers(value: bytes, key: bytes) -> bool:
    """Whether a lease of this value is for the block of a key too."""
    tag = key[:TAG_BYTES]
    return any(value[place : place + TAG_BYTES] == tag for place in range(OWNER_BYTES, len(value), TAG_BYTES))
