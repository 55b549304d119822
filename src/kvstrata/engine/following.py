"""Who follows: sequences that wait, in the queue, for blocks that another process computes just now.

A sequence that lacks blocks asks for the lease of the first of them. Who gets it leads. The others hold no
place in the pool; now and then they ask for the lease again, which is free when the leader is gone and tells
with it whether the block has appeared. Only then they look what else has, and load it. They compute
themselves when they have lost more time than they chose to risk, compared with having computed from the
start. Only the engine's thread is in here; it waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from kvstrata.cache.keys import SEGMENT_BLOCKS
from kvstrata.engine.cost import LoadPlan
from kvstrata.engine.leading import Leading, outcome_of
from kvstrata.engine.lease_pace import LeasePace
from kvstrata.engine.request import Sequence
from kvstrata.tiers.lease import Claim, Lease, lease_of, segment_of
from kvstrata.tiers.lease_desk import LeaseDesk

# go: load and compute by the plan; wait: look again later; again: a claim is under way, so look anew;
# load: load what is there, and go on waiting for the rest.
Verdict = Literal["go", "wait", "again", "load"]


@dataclass
class _Meeting:
    """A sequence that waits for a claim or for a leader.

    base: blocks that were there when it came; seen: the most that were there since; moved: when that became
    more. looked: whether all that is missing was looked for after the claim.
    """

    since: float
    base: int
    seen: int
    patience: float
    moved: float
    lease: Lease
    position: int
    looked: bool = True
    claim: Future[list[Claim]] | None = None
    followed: bool = False
    next_look: float = 0.0


class Following:
    """Those of one engine that ask for a lease, and followers. owner: the engine's id. clock: seconds."""

    def __init__(
        self,
        desk: LeaseDesk,
        pace: LeasePace,
        leading: Leading,
        *,
        owner: bytes,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._desk = desk
        self._pace = pace
        self._leading = leading
        self._counts = leading.counts
        self._owner = owner
        self._block_size = block_size
        self._clock = clock
        self._meetings: dict[Sequence, _Meeting] = {}

    @property
    def pending(self) -> bool:
        """Whether sequences wait for leases or leaders."""
        return bool(self._meetings)

    def meets(self, sequence: Sequence) -> bool:
        """Whether a sequence waits here."""
        return sequence in self._meetings

    def rests(self, sequence: Sequence) -> bool:
        """Whether it follows, and it is not yet time to look again, or a claim is under way."""
        meeting = self._meetings.get(sequence)
        if meeting is None or (meeting.claim is not None and meeting.claim.done()):
            return False
        patience = 0.0 if meeting.claim is None else meeting.patience
        return self._clock() < meeting.next_look + patience

    def seconds_to_look(self) -> float:
        """How long all sequences here rest; infinite where none waits for a leader."""
        looks = [m.next_look for m in self._meetings.values() if m.claim is None]
        return max(0.0, min(looks, default=math.inf) - self._clock())

    def decide(self, sequence: Sequence, plan: LoadPlan, end: int, load_seconds: float) -> Verdict:
        """What a waiting sequence does. plan: of what is there now; end: blocks that could be found at all.
        load_seconds: of a block, from where leaders store.
        """
        if self._leading.leads(sequence):
            return "go"
        meeting = self._meetings.get(sequence)
        if plan.available >= end or plan.end < plan.available:  # all there, or quicker computed than loaded
            self.part(sequence, plan.available, whole=plan.available >= end)
            return "go"
        if meeting is None:
            if not self._pace.worth(end - plan.available, load_seconds):
                return "go"
            self._meetings[sequence] = self._meet(sequence, plan.available, end)
            return "again"
        now = self._clock()
        if plan.available > meeting.seen:
            meeting.seen, meeting.moved = plan.available, now
            meeting.next_look = self._pace.next_look(now, now, end - meeting.seen)
        if meeting.claim is not None and (verdict := self._claimed(sequence, meeting, plan, end)) is not None:
            return verdict
        behind = now - meeting.since - (meeting.seen - meeting.base) * self._pace.block_seconds
        if behind > meeting.patience:
            self._counts.timeouts += 1
            self.part(sequence, plan.available)
            return "go"
        if now >= meeting.next_look:
            self._ask(meeting, sequence, meeting.seen, end)
            meeting.looked = False
            return "wait"
        return "load" if plan.end - plan.first >= SEGMENT_BLOCKS else "wait"

    def _meet(self, sequence: Sequence, available: int, end: int) -> _Meeting:
        lease = lease_of(sequence.chain, available, end, self._owner)
        patience = self._pace.patience(end - available)
        now = self._clock()
        meeting = _Meeting(now, available, available, patience, now, lease, available)
        self._ask(meeting, sequence, available, end)
        return meeting

    def _ask(self, meeting: _Meeting, sequence: Sequence, position: int, end: int) -> None:
        """Claim the first block that is missing, unless who computes it from an earlier one has it."""
        keys = sequence.chain.keys
        meeting.position = position
        meeting.lease = lease_of(sequence.chain, position, end, self._owner)
        meeting.looked = True
        meeting.next_look = self._pace.next_look(self._clock(), meeting.moved, end - position)
        watched = keys[segment_of(position) : position]
        meeting.claim = self._desk.claim([meeting.lease], self._pace.lease_seconds, [watched])

    def _claimed(self, sequence: Sequence, meeting: _Meeting, plan: LoadPlan, end: int) -> Verdict | None:
        """What comes of a claim; None: another leads."""
        assert meeting.claim is not None
        if self.rests(sequence):
            return "wait"
        outcome = outcome_of(meeting.claim) if meeting.claim.done() else None
        if outcome is None:
            self._counts.unavailable += 1
            if not meeting.followed:
                self.part(sequence, plan.available)
                return "go"
            self._give_back_when_won(meeting)
            meeting.claim = None
            return None  # there is a leader; whether it still is, the next claim may tell
        [claim] = outcome
        if not meeting.looked and (claim.won or claim.stored):
            meeting.looked = True
            return "again"
        meeting.claim = None
        if claim.held_by_another(meeting.lease.name, self._owner) or not claim.won:
            if claim.won:
                self._desk.release([meeting.lease])
            if not meeting.followed:
                meeting.followed = True
                self._counts.waits += 1
            return None
        if plan.available < meeting.seen:  # not all servers have answered that look-up
            self._desk.release([meeting.lease])
            return None
        if plan.available != meeting.position:  # it has appeared since: what is missing begins elsewhere
            self._desk.release([meeting.lease])
            self._ask(meeting, sequence, plan.available, end)
            return "again"
        self._lead(sequence, meeting, end)
        return "go"

    def part(self, sequence: Sequence, available: int, *, whole: bool = False) -> None:
        """A sequence waits no more, if it did. available: blocks there are; whole: that is all it needs."""
        meeting = self._meetings.pop(sequence, None)
        if meeting is None:
            return
        if meeting.claim is not None:
            self._give_back_when_won(meeting)
        if meeting.followed and available > meeting.base:
            self._counts.avoided_tokens += (available - meeting.base) * self._block_size
            self._counts.avoided += whole

    def _give_back_when_won(self, meeting: _Meeting) -> None:
        assert meeting.claim is not None
        lease, desk = meeting.lease, self._desk

        def ended(future: Future[list[Claim]]) -> None:
            outcome = outcome_of(future)
            if outcome is not None and outcome[0].won:
                desk.release([lease])

        meeting.claim.add_done_callback(ended)

    def _lead(self, sequence: Sequence, meeting: _Meeting, end: int) -> None:
        if meeting.followed:
            self._counts.takeovers += 1
        else:
            self._counts.wins += 1
        self.part(sequence, meeting.position)
        self._leading.begin(sequence, meeting.lease, meeting.position, end)
