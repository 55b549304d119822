"""Blocks on their way from the tiers into the pool: asked for at admission, committed when they are there.

A load fills blocks of its sequence's own; what was verified, contiguous and enough for all layer groups is
then published, and the sequence computes the rest. Memory that a tier may still write to stays the sequence's
until the tier is done with it, whatever became of the request. Only the engine's thread is in here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from kvstrata.cache.keys import KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.cache.matching import longest_run
from kvstrata.cache.retention import Retention
from kvstrata.cache.table import CacheSequence
from kvstrata.config import LoadMode
from kvstrata.engine.cost import Costs, LoadPlan, PrefillMeter, Present, plan
from kvstrata.engine.election import Election, Verdict
from kvstrata.engine.offload import Offload
from kvstrata.engine.outputs import TierLoad
from kvstrata.engine.request import Asked, Sequence
from kvstrata.tiers.stack import Load, TierStack
from kvstrata.tiers.tier import Address, Identity
from kvstrata.tiers.write_behind import Settled

_LOOKUP_WAIT = 0.002  # seconds that admission waits for tiers that answer at once, as those in memory do
_WAIT, _WAIT_FOR_OTHERS, _LEAST_WAIT = 0.01, 0.03, 0.001  # seconds of a step without work
_LOOKUP_AGE = 1.0  # seconds after which an answer is asked for anew
_MOST_ASKED = 16  # questions that wait for an answer at a time
_TRY_ANYWAY = 32  # so many times what was slow is left out before it is tried again


@dataclass
class _Loading:
    """One sequence's loads. plan: what was asked for; blocks: group and position of each, by load."""

    sequence: Sequence
    cache: CacheSequence
    plan: LoadPlan
    loads: list[Load]
    blocks: list[list[tuple[int, int]]]


@dataclass
class LoadCounts:
    """What loads came to so far. blocks asked for, and those that were verified and used."""

    asked: int = 0
    used: int = 0
    failed: dict[str, int] = field(default_factory=dict)


class Loads:
    """Looks up, plans, starts and commits loads.

    on_loaded(sequence, first, end): called when blocks `first` to `end` of a sequence were committed.
    """

    def __init__(
        self,
        cache: KVCache,
        stack: TierStack,
        offload: Offload,
        *,
        mode: LoadMode,
        token_budget: int,
        clock: Callable[[], float],
    ) -> None:
        self.prefill = PrefillMeter()
        self.counts = LoadCounts()
        self.on_loaded: Callable[[Sequence, int, int], None] | None = None
        self._cache = cache
        self._stack = stack
        self._offload = offload
        self._mode: LoadMode = mode
        self._clock = clock
        self._windows = tuple(group.window for group in cache.groups)
        self._loading: list[_Loading] = []
        self._abandoned: list[tuple[CacheSequence, list[Load]]] = []
        self._asked = 0
        self._patience = 0.0
        self._left_out = 0
        self.election = (
            None
            if stack.leases is None or mode == "never"
            else Election(stack.leases, self.prefill, cache, token_budget=token_budget, clock=clock)
        )

    @property
    def pending(self) -> bool:
        """Whether waiting for the tiers may bring something: an answer, blocks, or memory."""
        following = self.election is not None and self.election.pending
        return bool(self._asked or self._loading or self._abandoned or following)

    @property
    def wait_seconds(self) -> float:
        """How long a step without work waits: longer where only other processes may bring some."""
        if self._asked or self._loading or self._abandoned or self.election is None:
            return _WAIT
        return min(max(self.election.seconds_to_look(), _LEAST_WAIT), _WAIT_FOR_OTHERS)

    @property
    def lost_blocks(self) -> bool:
        """Whether tiers that do not answer hold memory of the pool, and nothing else is under way."""
        return bool(self._abandoned) and not self._loading

    def consider(self, sequence: Sequence, hit: int) -> LoadPlan | None:
        """What to load for a sequence after a hit; None while the tiers have not answered."""
        size = self._cache.block_size
        first, end = hit // size, (sequence.num_tokens - 1) // size
        wants = sequence.request.takes_hits or sequence.output_ids
        if self._mode == "never" or first >= end or not wants or sequence.recomputes:
            if self.election is not None:
                self.election.part(sequence, first, whole=first >= end)
            return LoadPlan(first, first, first)
        while (asked := self._ask(sequence, first, end)) is not None:
            chosen = self._plan(self._present(sequence, first, asked))
            if self.election is None:
                return chosen
            verdict = self.election.decide(sequence, chosen, end, self._block_load_seconds())
            if verdict != "again":
                return self._obey(verdict, chosen)
            sequence.asked = None
        return None

    def _ask(self, sequence: Sequence, first: int, end: int) -> Asked | None:
        """What the tiers have of the blocks `first` to `end`; None while they have not answered."""
        asked, now = sequence.asked, self._clock()
        if asked is None or asked.first > first or now - asked.at > _LOOKUP_AGE:
            if self._asked >= _MOST_ASKED:
                self._asked += 1
                return None
            keys = sequence.chain.keys[first:end]
            groups = range(len(self._windows))
            addresses = [Address(key, group) for group in groups for key in keys]
            segments = [sequence.chain.segment(block) for block in range(first, end)] * len(groups)
            worth = self._worth((end - first) * self._cache.block_size)
            asked = sequence.asked = Asked(first, now, self._stack.lookup(addresses, segments, worth))
            asked.lookup.wait(self._patience - time.monotonic())
        if not asked.lookup.done:
            self._asked += 1
            return None
        return asked

    def _obey(self, verdict: Verdict, chosen: LoadPlan) -> LoadPlan | None:
        """The plan of a sequence that goes, or that loads while it follows; None: it waits."""
        if verdict == "wait":
            return None
        return replace(chosen, follows=True) if verdict == "load" else chosen

    def rests(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for another process, and it is not yet time to look again."""
        return self.election is not None and self.election.rests(sequence)

    def meets(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a lease, or for who has it."""
        return self.election is not None and self.election.meets(sequence)

    def displaced(self) -> list[Sequence]:
        """Running sequences that come to what another process computes already."""
        return [] if self.election is None else self.election.displaced()

    def computed(self, sequence: Sequence) -> None:
        """Some of a running sequence's blocks were computed, or it begins to."""
        if self.election is not None:
            self.election.advanced(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence is over, or has to wait for its place: others need not wait for it."""
        if self.election is not None:
            self.election.leave(sequence)

    def begin_admission(self) -> None:
        """Sequences are going to be considered: those that wait for an answer are counted anew."""
        self._asked = 0
        self._patience = time.monotonic() + _LOOKUP_WAIT

    def opened(self, sequence: Sequence, plan: LoadPlan) -> None:
        """A sequence has its place: note why what is not loaded is computed."""
        if sequence.asked is not None and not plan.follows:
            size, request = self._cache.block_size, sequence.request
            request.recomputed["absent"] += ((sequence.num_tokens - 1) // size - plan.available) * size
            request.recomputed["cost"] += (plan.available - plan.end) * size

    def begin(self, sequence: Sequence, plan: LoadPlan) -> bool:
        """Start to load into a sequence that was just opened; False if the pool has no room for it."""
        cache, size = sequence.cache, self._cache.block_size
        assert cache is not None
        assert sequence.asked is not None
        taken = self._cache.place_for_load(cache, plan.end * size)
        if taken is None:
            return False
        present = self._present(sequence, plan.first, sequence.asked)
        by_tier: dict[int, list[tuple[int, int]]] = {}
        for group, positions in enumerate(taken):
            for position in positions:
                place = present.places[group][position - plan.first]
                by_tier.setdefault(place, []).append((group, position))
        loading = _Loading(sequence, cache, plan, [], [])
        for tier, blocks in sorted(by_tier.items()):
            memory = [self._cache.pools[g].payload(cache.tables[g][p]).numpy().data for g, p in blocks]
            wanted = [_identity(cache, g, p) for g, p in blocks]
            loading.loads.append(self._stack.load(tier, wanted, memory))
            loading.blocks.append(blocks)
            self.counts.asked += len(blocks)
        self._loading.append(loading)
        return True

    def collect(self) -> list[Sequence]:
        """Commit the loads that have ended; their sequences, without blocks where the tier hangs, and where
        they wait for more.
        """
        self.settle(self._stack.collect())
        self.reclaim()
        ended = [each for each in self._loading if all(load.done for load in each.loads)]
        if ended:
            self._loading = [each for each in self._loading if each not in ended]
            for each in ended:
                self._commit(each)
        self._offload.flush()
        return [each.sequence for each in ended]

    def settle(self, settled: Collection[Settled]) -> None:
        """Stores have ended: others may find the blocks now."""
        self._offload.settle(settled)
        if self.election is not None:
            self.election.settled([each.address for each in settled])

    def reclaim(self) -> None:
        """Take back the blocks of loads that were given up and that no tier touches any more."""
        self._abandoned = [entry for entry in self._abandoned if not self._returned(*entry)]

    def abandon(self, sequence: Sequence) -> None:
        """The sequence's request is over: its blocks come back when no tier writes to them any more."""
        for each in self._loading:
            if each.sequence is sequence:
                self._loading.remove(each)
                if not self._returned(each.cache, each.loads):
                    self._abandoned.append((each.cache, each.loads))
                return

    def used(self, sequence: Sequence, hit: int) -> None:
        """Tell the tiers that a sequence found blocks in the pool."""
        keys = sequence.chain.keys[: hit // self._cache.block_size]
        if keys:
            groups = range(len(self._windows))
            segments = [sequence.chain.segment(block) for block in range(len(keys))] * len(groups)
            self._stack.touch([Address(key, group) for group in groups for key in keys], segments)

    def _plan(self, present: Present) -> LoadPlan:
        costs = Costs(self.prefill.seconds_per_token, self._stack.speeds())
        chosen = plan(present, costs, self._mode)
        if chosen.end < chosen.available and self._mode == "auto":
            self._left_out += 1
            if self._left_out % _TRY_ANYWAY == 0:  # a tier that was slow once may be quick by now
                return plan(present, costs, "always")
        return chosen

    def _block_load_seconds(self) -> float:
        """What a block takes from where leaders store, beside others; 0 while that is not known."""
        assert self._stack.leases is not None
        speed = self._stack.speeds()[self._stack.leases.tier]
        return 0.0 if speed is None else sum(self._stack.context.payload_bytes) / speed.bandwidth

    def _worth(self, tokens: int) -> float:
        """Seconds that computing tokens takes, as far as that may keep a look-up from being made."""
        each = self.prefill.seconds_per_token
        return float("inf") if self._mode != "auto" or each is None else tokens * each

    def _present(self, sequence: Sequence, first: int, asked: Asked) -> Present:
        places = asked.lookup.places()
        count = len(places) // len(self._windows)
        begins = range(0, len(places), count)
        return Present(
            first=first,
            places=tuple(tuple(places[b + first - asked.first : b + count]) for b in begins),
            seen=self._seen(sequence.chain),
            block_size=self._cache.block_size,
            payload_bytes=self._stack.context.payload_bytes,
        )

    def _seen(self, chain: KeyChain) -> tuple[Retention, ...]:
        return tuple(chain.retention.within(window) for window in self._windows)

    def _commit(self, each: _Loading) -> None:
        """Publish what was verified, as far as it is contiguous and enough for all groups."""
        sequence, size = each.sequence, self._cache.block_size
        if any(load.touches_memory for load in each.loads):  # out of time
            self._abandoned.append((each.cache, each.loads))
            sequence.cache = None
            sequence.recomputes = True
            self._note(each, each.plan.first, {})
            return
        now = self._clock()
        sources: dict[tuple[int, int], int] = {}
        deadlines: dict[int, float] = {}
        for load, blocks in zip(each.loads, each.blocks, strict=True):
            for block, outcome in zip(blocks, load.outcomes(), strict=True):
                if outcome.miss is None and outcome.deadline > now:
                    sources[block] = load.tier
                    deadlines[block[1]] = min(deadlines.get(block[1], float("inf")), outcome.deadline)
                else:
                    reason = outcome.miss or "expired"
                    self.counts.failed[reason] = self.counts.failed.get(reason, 0) + 1
        seen = self._seen(each.cache.chain)
        end = longest_run(each.plan.first, each.plan.end, seen, size, lambda g, p: (g, p) in sources)
        keys = each.cache.chain.keys
        self._offload.loaded({Address(keys[p], g): tier for (g, p), tier in sources.items()})
        self._cache.commit_loaded(each.cache, end * size, deadlines)
        self._offload.flush()
        self._note(each, end, sources)
        if self.on_loaded is not None and end > each.plan.first:
            self.on_loaded(sequence, each.plan.first, end)
        if each.plan.follows:
            self._cache.release(each.cache)
            sequence.cache = None

    def _note(self, each: _Loading, end: int, sources: dict[tuple[int, int], int]) -> None:
        """Tell the request what came from where, and why the rest is computed."""
        request, size, plan = each.sequence.request, self._cache.block_size, each.plan
        for load, blocks in zip(each.loads, each.blocks, strict=True):
            got = sum(block in sources for block in blocks)
            per_block = load.nbytes // max(1, len(blocks))
            request.loads.append(TierLoad(self._stack.names[load.tier], got, got * per_block, load.seconds))
        self.counts.used += sum(position < end for _, position in sources)
        request.recomputed["failed"] += (plan.end - end) * size
        if request.counts_sources:
            request.counts_sources = plan.follows
            groups, tier = range(len(self._windows)), -1
            for position in reversed(range(plan.first, end)):
                # What nobody sees any more was not loaded: it counts with what comes after it.
                tier = max((sources[g, position] for g in groups if (g, position) in sources), default=tier)
                request.cached_by_source[self._stack.names[tier]] += size

    def _returned(self, cache: CacheSequence, loads: list[Load]) -> bool:
        """Release a sequence whose memory no tier touches any more; False if one still does."""
        if any(load.touches_memory for load in loads):
            return False
        self._cache.release(cache)
        return True


def _identity(cache: CacheSequence, group: int, position: int) -> Identity:
    chain = cache.chain
    return Identity(
        address=Address(chain.keys[position], group),
        parent=chain.parent(position),
        token_ids=chain.block_tokens(position),
        extras=chain.encoded_extras(position),
        segment=chain.segment(position),
    )
