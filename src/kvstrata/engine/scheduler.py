"""What runs in the next step: decodes first, then prefill chunks, then new sequences, in one token budget.

Where tokens are proposed ahead of a decode, they take part of the budget before prefill does, and blocks only
where some are left once all else has its own: nobody is preempted for a guess.

The best-ranked running sequence always makes progress (others are preempted for it, down to the last one,
and alone it fits, since longer requests were rejected on arrival), so that the engine cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile

from kvstrata.cache.manager import KVCache
from kvstrata.engine.cost import LoadPlan
from kvstrata.engine.loads import Loads
from kvstrata.engine.queue import WaitingQueue
from kvstrata.engine.request import Sequence, Status
from kvstrata.engine.work import Allot, Step, Work

# A prompt whose every logit is wanted runs in chunks of so many tokens: [chunk, vocab] floats are big.
LOGITS_CHUNK = 128
# A long prompt leaves this much of the budget to those behind it: short ones need not wait for its end.
_FIRST_SHARE = 0.75


class Scheduler:
    """Chooses the work of each step and holds the running sequences.

    spread: see `KVCache.open`. on_found: called when what a sequence found is in its tables, before it runs.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        token_budget: int,
        clock: Callable[[], float],
        loads: Loads | None = None,
        yield_pins: Callable[[], bool] = lambda: False,
        spread: Callable[[Sequence], float] = lambda sequence: 0.0,
        on_found: Callable[[Sequence], None] = lambda sequence: None,
        allot: Allot | None = None,
    ) -> None:
        self.cache = cache
        self.loading: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._clock = clock
        self._loads = loads
        self._yield_pins = yield_pins
        self._spread = spread
        self._on_found = on_found
        self._allot = allot
        self._leaders: dict[bytes, Sequence] = {}  # prompt blocks that are being computed just now, by key

    def schedule(self) -> list[Work]:
        """The work of the next step; empty only where nothing runs, and nothing waits but for the tiers."""
        self.cache.expire()
        self._collect_loads()
        self._displace()
        step = Step(self._token_budget)
        preempted = self.preemptions
        order = sorted(self.running, key=lambda s: s.rank)
        for sequence in order:
            if sequence.num_tokens - sequence.num_computed == 1:
                self._take(sequence, step)
        prefills = [s for s in order if s.num_tokens - s.num_computed > 1]
        self._look_ahead(step, alone=not prefills and not self.waiting)
        for sequence in prefills:
            first_of_many = sequence is prefills[0] and len(prefills) + len(self.waiting) > 1
            self._take(sequence, step, share=_FIRST_SHARE if first_of_many else 1.0)
        if self.preemptions == preempted:
            self._admit(step)
        if prefills:  # what nobody else needed
            self._take(prefills[0], step)
        self._cover_ahead(step)
        return list(step.works.values())

    def _look_ahead(self, step: Step, *, alone: bool) -> None:
        """Give proposed tokens their part of the budget. alone: nobody else wants any of it."""
        if self._allot is None:
            return
        decodes = [work for work in step.works.values() if work.sequence.output_ids]
        most = step.left if alone else step.left // 2
        if not decodes or most <= 0:
            return
        for work, room in zip(decodes, self._allot(decodes, most), strict=True):
            if room:
                step.rooms[work.sequence] = room
                step.left -= room

    def _cover_ahead(self, step: Step) -> None:
        """Provide blocks for what is to be proposed, where there are some."""
        for sequence, room in step.rooms.items():
            work = step.works.get(sequence)
            if work is None or sequence.cache is None:
                continue  # preempted since
            if self.cache.grow(sequence.cache, work.start + work.count + room):
                step.works[sequence] = replace(work, room=room)

    def _take(self, sequence: Sequence, step: Step, share: float = 1.0) -> None:
        """Give a running sequence as much of the budget that is left as it can use, or a share of it."""
        before = step.count(sequence)
        left = int(step.left * share)
        if sequence.status is not Status.RUNNING or left <= 0:
            return
        work = self._next_work(sequence, before + left)
        if work.count > before and self._make_room(work, step):
            step.put(work)
            self.waiting.serve(sequence.request.options.user, work.count - before)

    def _next_work(self, sequence: Sequence, budget: int) -> Work:
        start = sequence.num_computed
        count = min(sequence.num_tokens - start, budget)
        if not sequence.request.takes_hits and not sequence.output_ids:
            count = min(count, LOGITS_CHUNK)
        return Work(sequence, start, count)

    def _make_room(self, work: Work, step: Step) -> bool:
        """Cover the work's tokens with blocks, preempting the worst-ranked; False if that is itself."""
        assert work.sequence.cache is not None
        while not self.cache.grow(work.sequence.cache, work.start + work.count):
            victim = max(self.running, key=lambda s: s.rank)
            if victim is work.sequence and self._yield_pins():
                continue
            step.drop(victim)
            self.preempt(victim)
            if victim is work.sequence:
                return False
        return True

    def arrive(self, sequence: Sequence) -> None:
        """Queue the first sequence of a new request."""
        sequence.request.found_on_arrival = self._hit(sequence)
        self.waiting.arrive(sequence.request.options.user)
        self.waiting.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; it is computed again later, with the same outcome."""
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.request.preemptions += 1
        self.preemptions += 1
        self.waiting.push(sequence)

    def take_back(self, works: Iterable[Work]) -> None:
        """Undo a step that broke off: what is left of its sequences is computed again."""
        for work in works:
            if work.sequence.status is Status.RUNNING:
                self.preempt(work.sequence)
        for sequence in [s for s in self.running if s.num_computed == s.num_tokens]:
            self.preempt(sequence)  # forked in that step, and not sampled yet

    def finish(self, sequence: Sequence) -> None:
        """A sequence is done, wherever it stands; harmless when it already was."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.LOADING:
            assert self._loads is not None
            self.loading.remove(sequence)
            self._stop_leading(sequence, sequence.chain.keys)
            self._loads.abandon(sequence)
            sequence.cache = None
        self._stop_meeting(sequence)
        self.waiting.discard(sequence)
        sequence.status = Status.FINISHED

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        self.running.remove(sequence)
        self._stop_leading(sequence, sequence.chain.keys)
        if self._loads is not None:
            self._loads.leave(sequence)
        self.cache.release(sequence.cache)
        sequence.cache = None

    def _stop_meeting(self, sequence: Sequence) -> None:
        """A sequence that waits does so no longer for other processes, nor do others here for it."""
        if self._loads is not None and sequence.status in {Status.WAITING, Status.LOADING}:
            self._stop_leading(sequence, sequence.chain.keys)
            self._loads.leave(sequence)

    def _displace(self) -> None:
        """Who comes to what another process computes gives up its place, and waits for that."""
        for sequence in [] if self._loads is None else self._loads.displaced():
            if sequence.status is Status.RUNNING:
                self.preempt(sequence)

    def _admit(self, step: Step) -> None:
        placed = [*self.running, *self.loading]
        places = self._max_num_seqs - len(placed) - sum(s.request.answers_to_fork for s in placed)
        if self._loads is not None:
            self._loads.begin_admission()
        for sequence in self.waiting.in_order():
            if step.left <= 0 or places <= 0:
                return
            if sequence.waits_for in self._leaders or (
                self._loads is not None and self._loads.rests(sequence)
            ):
                continue  # others need not wait with it
            hit = self._hit(sequence)
            sequence.waits_for = self._led_by_another(sequence, hit)
            if sequence.waits_for is not None:
                self._stop_meeting(sequence)
                continue
            plan = None if self._loads is None else self._loads.consider(sequence, hit)
            if plan is None and self._loads is not None:  # tiers have not answered, or another process leads
                self._lead(sequence, hit)  # one here waits for that, the others for that one
                continue
            needed = 1 + sequence.request.answers_to_fork
            if places < needed or not self._find_place(sequence, hit, plan):
                self._stop_meeting(sequence)
                return
            places -= needed
            self._take(sequence, step)

    def _find_place(self, sequence: Sequence, hit: int, plan: LoadPlan | None) -> bool:
        """Open a sequence, without pins where nothing else has a place; False if there is no room."""
        if self._open(sequence, hit, plan):
            return True
        idle = not self.running and not self.loading
        return idle and self._yield_pins() and self._open(sequence, hit, plan)

    def _hit(self, sequence: Sequence) -> int:
        """Tokens that the pool holds; the last token is always computed, since its logits are wanted."""
        if not sequence.request.takes_hits and not sequence.output_ids:
            return 0
        return self.cache.match(sequence.chain, sequence.num_tokens - 1)

    def _led_by_another(self, sequence: Sequence, hit: int) -> bytes | None:
        """The last of the blocks it lacks that are being computed for another sequence just now, if any.

        The last, so that a follower is looked at once a leader and not once a block of the leader's.
        """
        if not (sequence.request.takes_hits and self.cache.prefix_caching):
            return None
        first_missing = hit // self.cache.block_size
        matchable = (sequence.num_tokens - 1) // self.cache.block_size
        leaders = self._leaders
        led = takewhile(
            lambda key: leaders.get(key, sequence) is not sequence,
            sequence.chain.keys[first_missing:matchable],
        )
        return next(iter(deque(led, maxlen=1)), None)

    def _open(self, sequence: Sequence, hit: int, plan: LoadPlan | None) -> bool:
        request = sequence.request
        # One block beyond what is known: a sequence that is admitted only to be preempted at once is waste.
        reserve = min(sequence.num_tokens + self.cache.block_size, request.limit)
        opened = self.cache.open(
            sequence.chain,
            hit,
            max(reserve, sequence.num_tokens),
            priority=-request.options.priority,  # to the cache, higher is more important
            ttl=request.options.ttl,
            prompt_tokens=len(request.prompt_token_ids),
            spread=self._spread(sequence),
        )
        if opened is None:
            return False
        sequence.cache = opened
        self.waiting.discard(sequence)
        sequence.status = Status.RUNNING
        self._lead(sequence, hit)
        if request.first_scheduled is None:
            request.first_scheduled = self._clock()
            # What was not there on arrival was computed for another request in the meantime.
            request.cached_by_source["pool"] = min(hit, request.found_on_arrival)
            request.cached_by_source["shared"] = max(0, hit - request.found_on_arrival)
        if self._loads is not None and plan is not None:
            self._load(sequence, hit, plan, self._loads)
        if sequence.status is Status.RUNNING:
            self.running.append(sequence)
            request.counts_sources = False
            self._on_found(sequence)
        if self._loads is not None:
            self._loads.computed(sequence)
        return True

    def _load(self, sequence: Sequence, hit: int, plan: LoadPlan, loads: Loads) -> None:
        """Start the loads of a sequence that was just opened, if there are any and the pool has room."""
        loads.opened(sequence, plan)
        if sequence.request.counts_sources:
            loads.used(sequence, hit)
        if not plan.empty and loads.begin(sequence, plan):
            sequence.status = Status.LOADING
            self.loading.append(sequence)
        sequence.asked = None

    def _collect_loads(self) -> None:
        """Sequences whose loads have ended run from now on, or wait again where their tier hangs."""
        if self._loads is None:
            return
        size = self.cache.block_size
        for sequence in self._loads.collect():
            self.loading.remove(sequence)
            if sequence.cache is None:
                if not self._loads.meets(sequence):  # others here wait for one that follows on
                    self._stop_leading(sequence, sequence.chain.keys)
                sequence.status = Status.WAITING
                self.waiting.push(sequence)
            else:
                sequence.status = Status.RUNNING
                self.running.append(sequence)
                self._on_found(sequence)
                self._stop_leading(sequence, sequence.chain.keys[: sequence.num_computed // size])

    def _lead(self, sequence: Sequence, hit: int) -> None:
        for key in sequence.chain.keys[hit // self.cache.block_size :]:
            self._leaders.setdefault(key, sequence)

    def _stop_leading(self, sequence: Sequence, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._leaders.get(key) is sequence:
                del self._leaders[key]

    def computed(self, work: Work) -> None:
        """Tell that a work's K and V are in the pool: full blocks are published, followers may start."""
        sequence = work.sequence
        assert sequence.cache is not None
        size = self.cache.block_size
        end = work.start + work.count
        self.cache.commit(sequence.cache, end)
        self._stop_leading(sequence, sequence.chain.keys[work.start // size : end // size])
        if self._loads is not None:
            self._loads.computed(sequence)

    def accepted(self, sequence: Sequence) -> None:
        """Tell that the token after the computed ones was proposed rightly: its K and V are in the pool."""
        assert sequence.cache is not None
        self.cache.commit(sequence.cache, sequence.num_computed + 1)

    def roll_back(self, sequence: Sequence) -> None:
        """Give back the blocks of proposed tokens that were not accepted."""
        assert sequence.cache is not None
        self.cache.truncate(sequence.cache, sequence.num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new answer start from where its first sibling stands."""
        assert parent.cache is not None
        child.cache = self.cache.fork(parent.cache)
        child.chain = child.cache.chain
        child.status = Status.RUNNING
        self.running.append(child)
