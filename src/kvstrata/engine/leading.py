"""Who leads: sequences that compute blocks which other processes wait for, and the leases they hold for it.

A leader leases its following segments as it goes, before a step comes to them, and gives each lease back when
the segment's blocks are stored, where others find them. Only the engine's thread is in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from kvstrata.cache.keys import SEGMENT_BLOCKS
from kvstrata.engine.lease_pace import LeasePace
from kvstrata.engine.request import Sequence as Answer
from kvstrata.tiers.lease import Claim, Lease, lease_of, segment_of
from kvstrata.tiers.lease_desk import LeaseDesk
from kvstrata.tiers.tier import Address

T = TypeVar("T")


@dataclass
class LeaseCounts:
    """wins: sequences that led. waits: sequences that followed. takeovers: of those, who led after all, since
    the leader was gone; timeouts: of those, who computed without a lease, since it was too slow. lost: leases
    that were another's by the time they were renewed. unavailable: claims that the store did not answer.
    avoided: prompts, and avoided_tokens, that a leader elsewhere computed for one that followed.
    """

    wins: int = 0
    waits: int = 0
    takeovers: int = 0
    timeouts: int = 0
    lost: int = 0
    unavailable: int = 0
    avoided: int = 0
    avoided_tokens: int = 0


@dataclass
class _Held:
    """A lease of ours. unstored: records that are still to be stored, by block key. computed: all blocks."""

    lease: Lease
    start: int
    end: int
    unstored: Counter[bytes]
    renew_at: float
    computed: bool = False


@dataclass
class _Lead:
    """A sequence that leads. claimed: blocks up to here are ours, or asked for. foreign: segments that others
    have leased."""

    end: int
    claimed: int
    held: list[_Held] = field(default_factory=list)
    foreign: set[int] = field(default_factory=set)


class Leading:
    """The leaders of one engine.

    owner: this engine's id. groups: layer groups, each of which stores a record of a block. ahead: blocks
    that the next step may come to. clock: seconds.
    """

    def __init__(
        self,
        desk: LeaseDesk,
        pace: LeasePace,
        *,
        owner: bytes,
        block_size: int,
        groups: int,
        ahead: int,
        clock: Callable[[], float],
    ) -> None:
        self.counts = LeaseCounts()
        self._desk = desk
        self._pace = pace
        self._owner = owner
        self._block_size = block_size
        self._groups = groups
        self._ahead = ahead + SEGMENT_BLOCKS
        self._clock = clock
        self._leads: dict[Answer, _Lead] = {}
        self._held: dict[bytes, _Held] = {}  # by each block key that is not stored yet
        self._claims: list[tuple[Future[list[Claim]], Answer, list[_Held]]] = []
        self._renewals: list[tuple[Future[list[bool]], list[_Held]]] = []

    def begin(self, sequence: Answer, lease: Lease, position: int, end: int) -> None:
        """A sequence has the lease of its first missing block: it leads up to block `end`."""
        stop = min(end, segment_of(position) + SEGMENT_BLOCKS)
        lead = self._leads[sequence] = _Lead(end, stop)
        self._hold(lead, self._make(lease, sequence, position, stop))
        self.advance(sequence, position)

    def leads(self, sequence: Answer) -> bool:
        """Whether a sequence computes for others too."""
        return sequence in self._leads

    def advance(self, sequence: Answer, computed: int) -> None:
        """So many of its blocks are computed: the next segments are leased before a step comes to them."""
        lead = self._leads.get(sequence)
        if lead is None:
            return
        for held in lead.held:
            if not held.computed and held.end <= computed:
                held.computed = True
        if computed >= lead.end:
            del self._leads[sequence]
            return
        wanted: list[_Held] = []
        while lead.claimed < min(lead.end, computed + self._ahead):
            start, stop = lead.claimed, min(lead.end, segment_of(lead.claimed) + SEGMENT_BLOCKS)
            lease = lease_of(sequence.chain, start, stop, self._owner)
            wanted.append(self._make(lease, sequence, start, stop))
            lead.claimed = stop
        if wanted:
            leases = [held.lease for held in wanted]
            claim = self._desk.claim(leases, self._pace.lease_seconds, [()] * len(leases))
            self._claims.append((claim, sequence, wanted))

    def leave(self, sequence: Answer) -> None:
        """A sequence leads no more: what it has not computed is anybody's at once."""
        lead = self._leads.pop(sequence, None)
        if lead is not None:
            self._release([held for held in lead.held if not held.computed])

    def stored(self, addresses: Iterable[Address]) -> None:
        """Records are where others find them, or will not be: segments of which all are so are given back."""
        done: list[_Held] = []
        for address in addresses:
            held = self._held.get(address.key)
            if held is not None:
                held.unstored[address.key] -= 1
                if held.unstored[address.key] <= 0:
                    del held.unstored[address.key], self._held[address.key]
                    if not held.unstored:
                        done.append(held)
        self._release(done)

    def tend(self) -> None:
        """Take in what claims and renewals came to, and renew what is still being computed."""
        if not (self._leads or self._claims or self._renewals):
            return
        self._take_claims()
        self._take_renewals()
        now = self._clock()
        due = [
            held
            for lead in self._leads.values()
            for held in lead.held
            if held.renew_at <= now and held.unstored
        ]
        if due:
            for held in due:
                held.renew_at = now + self._pace.renew_seconds
            renewal = self._desk.renew([held.lease for held in due], self._pace.lease_seconds)
            self._renewals.append((renewal, due))

    def displaced(self) -> list[Answer]:
        """Leaders that come to a segment which another leads: they are to follow it, and lead no more."""
        found = []
        for sequence, lead in self._leads.items():
            if lead.foreign and segment_of(sequence.num_computed // self._block_size) in lead.foreign:
                found.append(sequence)
        return found

    def _make(self, lease: Lease, sequence: Answer, start: int, stop: int) -> _Held:
        unstored = Counter(dict.fromkeys(sequence.chain.keys[start:stop], self._groups))
        return _Held(lease, start, stop, unstored, self._clock() + self._pace.renew_seconds)

    def _hold(self, lead: _Lead, held: _Held) -> None:
        lead.held.append(held)
        self._held.update(dict.fromkeys(held.unstored, held))

    def _unhold(self, held: _Held) -> None:
        """What is stored of it tells nothing any more."""
        for key in held.unstored:
            if self._held.get(key) is held:
                del self._held[key]

    def _release(self, leases: Sequence[_Held]) -> None:
        if not leases:
            return
        for held in leases:
            self._unhold(held)
            held.unstored.clear()
        self._desk.release([held.lease for held in leases])

    def _take_claims(self) -> None:
        under_way, self._claims = self._claims, []
        for future, sequence, wanted in under_way:
            if not future.done():
                self._claims.append((future, sequence, wanted))
                continue
            outcome, lead = outcome_of(future), self._leads.get(sequence)
            if outcome is None:
                self.counts.unavailable += 1
                if lead is not None:  # asked for again before the next step
                    lead.claimed = min(lead.claimed, wanted[0].start)
                continue
            won = [held for held, claim in zip(wanted, outcome, strict=True) if claim.won]
            if lead is None:  # gone meanwhile
                self._desk.release([held.lease for held in won])
                continue
            for held, claim in zip(wanted, outcome, strict=True):
                if claim.won:
                    self._hold(lead, held)
                elif claim.held_by_another(held.lease.name, self._owner):
                    lead.foreign.add(segment_of(held.start))

    def _take_renewals(self) -> None:
        under_way, self._renewals = self._renewals, []
        for future, leases in under_way:
            if not future.done():
                self._renewals.append((future, leases))
                continue
            lost = [held for held, kept in zip(leases, outcome_of(future) or (), strict=False) if not kept]
            for held in lost:
                if held.unstored and not held.computed:
                    self.counts.lost += 1
                    self._lose(held)

    def _lose(self, lost: _Held) -> None:
        """Another may have taken over: what is not computed yet is its, or has to be claimed anew."""
        for lead in self._leads.values():
            if lost in lead.held:
                lead.held.remove(lost)
                lead.foreign.add(segment_of(lost.start))
        self._unhold(lost)


def outcome_of(future: Future[T]) -> T | None:
    """What a call came to; None where it failed."""
    return None if future.cancelled() or future.exception() is not None else future.result()
