"""Load or recompute: what of the blocks found below the pool is quicker to load than to compute again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.cache.matching import longest_run
from kvstrata.cache.retention import Retention
from kvstrata.config import LoadMode
from kvstrata.tiers.meter import Speed
from kvstrata.tiers.stack import NOWHERE

_KEEP = 0.8  # weight of what was known of the prefill speed at each new step
_LEAST_TOKENS = 16  # of a step that tells something about prefill


class PrefillMeter:
    """Seconds that a prompt token takes to compute, from the steps that compute them, the latest first."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step was run; it counts if most of it was prefill."""
        if prefill_tokens >= max(_LEAST_TOKENS, 4 * decode_tokens):
            self._tokens = self._tokens * _KEEP + prefill_tokens
            self._seconds = self._seconds * _KEEP + seconds

    @property
    def seconds_per_token(self) -> float | None:
        """None before the first such step."""
        return self._seconds / self._tokens if self._tokens else None


@dataclass(frozen=True)
class Present:
    """Where the blocks after a hit are. first: position of the first. places: the nearest tier that has it,
    or NOWHERE, by group and then position from `first` on. seen: which tokens queries see, by group.
    """

    first: int
    places: tuple[tuple[int, ...], ...]
    seen: tuple[Retention, ...]
    block_size: int
    payload_bytes: tuple[int, ...]

    def reach(self, tiers: int) -> int:
        """Blocks from the prompt's start on that could be had from the nearest `tiers` tiers and the hit."""

        def has(group: int, position: int) -> bool:
            place = self.places[group][position - self.first]
            return place != NOWHERE and place < tiers

        limit = self.first + len(self.places[0])
        return longest_run(self.first, limit, self.seen, self.block_size, has)


@dataclass(frozen=True)
class Costs:
    """What things take. seconds_per_token: of prefill; speeds: of loads from each tier. None: not known."""

    seconds_per_token: float | None
    speeds: Sequence[Speed | None]


@dataclass(frozen=True)
class LoadPlan:
    """Blocks `first` to `end` are to be loaded; up to `available` they could be.

    follows: another process computes what comes after `available`: it is waited for again after the load.
    """

    first: int
    end: int
    available: int
    follows: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to load."""
        return self.end <= self.first


def plan(present: Present, costs: Costs, mode: LoadMode) -> LoadPlan:
    """How far to load: the end with the least sum of loading to there and computing what is left of it.

    A tier of which nothing is known yet counts as quick: the first load tells. `always` takes all there is,
    `never` nothing.
    """
    available = present.reach(len(costs.speeds))
    if mode == "never" or available <= present.first:
        return LoadPlan(present.first, present.first, available)
    best: tuple[float, int] | None = None
    for end in sorted(
        {present.first, *(present.reach(n + 1) for n in range(len(costs.speeds)))}, reverse=True
    ):
        seconds = _load_seconds(present, costs, end) + _compute_seconds(present, costs, available - end)
        if best is None or seconds < best[0]:
            best = (seconds, end)
        if mode == "always" or costs.seconds_per_token is None:
            break
    assert best is not None
    return LoadPlan(present.first, best[1], available)


def _compute_seconds(present: Present, costs: Costs, blocks: int) -> float:
    return blocks * present.block_size * (costs.seconds_per_token or 0.0)


def _load_seconds(present: Present, costs: Costs, end: int) -> float:
    """Of the blocks that a hit of `end` needs, one batched request to each tier, one after the other."""
    nbytes = [0] * len(costs.speeds)
    for group, position in needed(present, end):
        nbytes[present.places[group][position - present.first]] += present.payload_bytes[group]
    return sum(
        speed.seconds(count)
        for speed, count in zip(costs.speeds, nbytes, strict=True)
        if count and speed is not None
    )


def needed(present: Present, end: int) -> list[tuple[int, int]]:
    """Group and position of each block after the hit that the token at `end` blocks can see."""
    return [
        (group, position)
        for group, seen in enumerate(present.seen)
        for position in seen.visible_blocks(end, present.block_size)
        if position >= present.first
    ]
