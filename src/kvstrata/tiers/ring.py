"""Consistent hashing: which servers keep what, the same in every process that knows the same members.

Each member has points on a circle of 64-bit positions, in proportion to its weight; a name belongs to the
member of the first point at or after its own position, and its replicas to the next distinct members after
that (Karger et al., STOC 1997). Members that come or go move only what they gain or lose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

POINTS = 1024  # of a member of weight 1: shares then differ by some 3 %
LEAST_POINTS = 160
_POSITION_BYTES = 8
_A_DIGEST = 32 // _POSITION_BYTES  # points that one digest gives


@dataclass(frozen=True)
class Member:
    """A server on the ring. name: the same in every process, as `host:port`. weight: its share's size."""

    name: str
    weight: float = 1.0


class Ring:
    """A pure function from names to members: neither order nor history of the membership matters.

    points: of a member of weight 1. bits: of a position; tests use few, so that points collide, and the
    member whose name sorts first then has the position.
    """

    def __init__(self, members: Iterable[Member], points: int = POINTS, bits: int = 64) -> None:
        self.members = tuple(sorted(set(members), key=lambda member: member.name))
        self._shift = 64 - bits
        placed = sorted(
            (position >> self._shift, member.name)
            for member in self.members
            for position in _points(member, points)
        )
        self._positions = [position for position, _ in placed]
        self._names = [name for _, name in placed]

    def position(self, name: bytes) -> int:
        """Where a name lies on the circle."""
        return int.from_bytes(sha256(name).digest()[:_POSITION_BYTES], "big") >> self._shift

    def owner(self, name: bytes) -> str | None:
        """The first of `owners`; None where there are no members."""
        if not self._names:
            return None
        return self._names[bisect_left(self._positions, self.position(name)) % len(self._names)]

    def owners(self, name: bytes, count: int) -> tuple[str, ...]:
        """The first `count` distinct members for a name, or all where there are fewer, the owner first."""
        found: dict[str, None] = {}
        wanted = min(count, len(self.members))
        place = bisect_left(self._positions, self.position(name))
        while len(found) < wanted:
            found[self._names[place % len(self._names)]] = None
            place += 1
        return tuple(found)


def _points(member: Member, points: int) -> list[int]:
    """The member's positions, 64 bits each."""
    count = max(1, round(points * member.weight))
    found: list[int] = []
    for number in range(-(-count // _A_DIGEST)):
        digest = sha256(f"{member.name}#{number}".encode()).digest()
        found += [
            int.from_bytes(digest[begin : begin + _POSITION_BYTES], "big")
            for begin in range(0, len(digest), _POSITION_BYTES)
        ]
    return found[:count]
