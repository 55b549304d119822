"""What goes first when room is needed: one interface for the pool, the tiers and the planner.

A policy knows every entry that can be found, in use or not; who owns the entries tells it which are pinned
when it asks for victims. Policies are deterministic: the same calls give the same victims.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Origin = Literal["prompt", "answer"]


@dataclass(frozen=True)
class Meta:
    """What a policy may weigh of an entry.

    parent: key of the block before it, empty where it is found without that. group: layer group. depth:
    block position in its sequence. bytes: its payload. cost: of computing it again, relative. priority: of
    the request, higher is more important. born: when it was published; deadline: from when on it is not
    served (seconds of the owner's clock). origin: where its tokens came from. turn: of the conversation.
    slipped: it left the window of the last sequence using it. dirty: it could not be kept in a place below
    yet, so that to evict it is to lose it. segment: see `KeyChain.segment`. spread: share of times to live
    to take off; no policy weighs these two.
    """

    parent: bytes
    group: int = 0
    depth: int = 0
    bytes: int = 0
    cost: float = 1.0
    priority: int = 0
    born: float = 0.0
    deadline: float = math.inf
    origin: Origin = "prompt"
    turn: int = 0
    slipped: bool = False
    dirty: bool = False
    spread: float = 0.0
    segment: bytes = b""  # type: ignore[valid-type]  # the field above has the type's name


class EvictionPolicy(Protocol):
    """An order over entries. Times are seconds of the owner's clock and never go backwards."""

    def insert(self, key: bytes, meta: Meta, now: float) -> None:
        """Add an entry, last used `now`, or give the one of that key a new meta."""

    def touch(self, keys: Iterable[bytes], now: float) -> None:
        """These entries were used, or are no longer pinned; keys that are not here are passed over."""

    def remove(self, key: bytes) -> None:
        """Drop an entry, if it is here."""

    def victims(self, n: int, pinned: Container[bytes], now: float) -> list[bytes]:
        """Up to `n` entries to evict, first to go first; they leave the policy.

        Expired ones go first. None is in `pinned`; one found pinned is not looked at again until it is
        touched, so the owner touches what it unpins.
        """

    def expired(self, now: float) -> list[bytes]:
        """All entries whose deadline has come, earliest first, pinned or not; they leave the policy."""

    def clear(self) -> None:
        """Drop all entries."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...
