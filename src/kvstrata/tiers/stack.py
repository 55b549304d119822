"""The tiers of an engine, nearest first: looked up together, loaded from one by one, stored to all.

One thread uses a stack; it never waits for a tier but in `wait`, `drain` and `close`, which are bounded.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvstrata.tiers.handle import TierHandle
from kvstrata.tiers.lease_desk import LeaseDesk
from kvstrata.tiers.meter import Speed
from kvstrata.tiers.tier import Address, Identity, Loaded, StoreContext, Tier, TierUsage
from kvstrata.tiers.worker import completed
from kvstrata.tiers.write_behind import Offer, Settled, WriteBehind

T = TypeVar("T")

QUEUE_BYTES = 256 << 20
TIMEOUT_SECONDS = 10.0
NOWHERE = -1
_USAGE_SECONDS = 0.2


@dataclass(frozen=True)
class TierStats:
    """One tier at one moment. state: of its breaker. load, store: how quick it was (None: not used yet).

    queue_drops: blocks that were not handed to it, by reason, and those that it did not keep.
    """

    name: str
    usage: TierUsage
    state: str
    trips: int
    load: Speed | None
    store: Speed | None
    queue_drops: dict[str, int]


class Lookup:
    """A question to all tiers at once. addresses: what was asked for."""

    def __init__(
        self,
        addresses: Sequence[Address],
        answers: list[Future[list[bool]]],
        due: float,
        clock: Callable[[], float],
    ) -> None:
        self.addresses = addresses
        self._answers = answers
        self._due = due
        self._clock = clock

    @property
    def done(self) -> bool:
        """Whether all tiers have answered, or are out of time."""
        return all(answer.done() for answer in self._answers) or self._clock() >= self._due

    def wait(self, timeout: float) -> bool:
        """Wait for the answers, at most so many seconds; whether it is done."""
        end = time.monotonic() + timeout
        for answer in self._answers:
            if not answer.done():
                try:
                    answer.exception(max(0.0, end - time.monotonic()))
                except TimeoutError:
                    break
        return self.done

    def places(self) -> list[int]:
        """The nearest tier that has each block, NOWHERE where none has."""
        places = [NOWHERE] * len(self.addresses)
        for tier in reversed(range(len(self._answers))):
            answer = self._answers[tier]
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                for number, there in enumerate(answer.result()):
                    if there:
                        places[number] = tier
        return places


class Load:
    """Blocks on their way from one tier. bytes: of all of them. began, seconds: by the clock."""

    def __init__(
        self,
        tier: int,
        future: Future[list[Loaded]],
        wanted: Sequence[Identity],
        *,
        nbytes: int,
        due: float,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self.wanted = wanted
        self.nbytes = nbytes
        self.began = clock()
        self.seconds = 0.0
        self._clock = clock
        self._future = future
        self._due = due
        future.add_done_callback(self._end)

    @property
    def touches_memory(self) -> bool:
        """Whether the tier may still write to the blocks."""
        return not self._future.done()

    @property
    def done(self) -> bool:
        """Whether its outcome is known, or it is out of time."""
        return self._future.done() or self._clock() >= self._due

    def outcomes(self) -> list[Loaded]:
        """Of each block, in order; failures of the tier are misses."""
        if not self._future.done() or self._future.exception() is not None:
            return [Loaded("io_error")] * len(self.wanted)
        return self._future.result()

    def _end(self, future: Future[list[Loaded]]) -> None:
        self.seconds = self._clock() - self.began


class TierStack:
    """Ordered tiers behind one face.

    queue_bytes: of blocks on their way to the tiers. timeout: seconds after which a call of a tier is given
    up. clock: seconds, monotonic; deadlines are by it. leases: of the nearest tier that other processes share
    and that keeps some, if any does. shortest_life: seconds that some tier serves a block at most.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        context: StoreContext,
        *,
        queue_bytes: int = QUEUE_BYTES,
        timeout: float = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context = context
        self._clock = clock
        self._timeout = timeout
        self._woken = threading.Event()
        self._handles = [TierHandle(tier, timeout, clock, self._woken) for tier in tiers]
        self._queue = WriteBehind(self._handles, context.payload_bytes, queue_bytes)
        self._closed = False
        self._usages = [TierUsage() for _ in tiers]
        self.names = tuple(tier.name for tier in tiers)
        desks = (LeaseDesk.of(number, handle) for number, handle in enumerate(self._handles))
        self.leases = next((desk for desk in desks if desk is not None), None)
        lives: list[float] = [getattr(tier, "ttl", math.inf) for tier in tiers]
        self.shortest_life = min(lives, default=math.inf)

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers themselves, nearest first, for what only some of them can do."""
        return tuple(handle.tier for handle in self._handles)

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way to a tier."""
        return self._queue.pending

    def lookup(
        self, addresses: Sequence[Address], segments: Sequence[bytes] = (), worth: float = math.inf
    ) -> Lookup:
        """Ask the tiers which blocks they have; segments: of each address, see `Tier.lookup`.

        worth: seconds that the blocks save at most; a tier whose look-ups take longer is passed over.
        """
        answers = [
            handle.lookup(addresses, segments)
            if handle.worth_asking(worth)
            else completed([False] * len(addresses))
            for handle in self._handles
        ]
        return Lookup(addresses, answers, self._clock() + self._timeout, self._clock)

    def load(self, tier: int, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Load:
        """Read blocks from one tier; see `Tier.load`."""
        handle = self._handles[tier]
        nbytes = sum(memory.nbytes for memory in into)
        due = handle.overdue_at(nbytes)
        future = handle.load(wanted, into)
        return Load(tier, future, wanted, nbytes=nbytes, due=due, clock=self._clock)

    def has_room(self, group: int) -> bool:
        """Whether some tier would get a block of this layer group that is offered now."""
        return self._queue.has_room(group)

    def offer(self, offers: Sequence[Offer], above: int | None = None) -> list[bool]:
        """Queue blocks for all tiers, or those above one; whether any will get each."""
        return self._queue.offer(offers, range(len(self._handles) if above is None else above))

    def collect(self) -> list[Settled]:
        """Blocks that were stored, or not, since the last call; breakers look at overdue calls."""
        self._woken.clear()
        for handle in self._handles:
            handle.check()
        return self._queue.collect()

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        """Note a use of blocks that were found in the pool."""
        for handle in self._handles:
            handle.post(handle.tier.touch, addresses, segments)

    def pin(self, addresses: Sequence[Address], deadline: float, timeout: float = 1.0) -> list[bool]:
        """Keep blocks in the tiers that have them; whether any has each, as far as is known in time."""
        posted = [handle.post(handle.tier.pin, addresses, deadline) for handle in self._handles]
        kept = [False] * len(addresses)
        for future in posted:
            answer = _within(future, timeout)
            for number, there in enumerate(answer or []):
                kept[number] = kept[number] or there
        return kept

    def unpin(self, addresses: Sequence[Address]) -> None:
        """Undo `pin`."""
        for handle in self._handles:
            handle.post(handle.tier.unpin, addresses)

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        """Remove blocks from all tiers, also those on their way there."""
        for handle in self._handles:
            handle.post(handle.tier.drain)
            handle.post(handle.tier.delete, addresses, segments)

    def clear(self, timeout: float) -> list[str]:
        """Remove all blocks of this model from all tiers; the names of those that did not say so in time."""
        posted = []
        for handle in self._handles:
            handle.post(handle.tier.drain)
            posted.append((handle.name, handle.post(_done, handle.tier.clear)))
        return [name for name, future in posted if not _within(future, timeout)]

    def probe(self, timeout: float) -> None:
        """Have each tier make some reads, so that it is known how quick they are before the first load.

        One that has not done so within so many seconds is judged by its first load.
        """
        end = time.monotonic() + timeout
        for handle, posted in [(handle, handle.post(handle.tier.probe)) for handle in self._handles]:
            for nbytes, seconds in _within(posted, end - time.monotonic()) or []:
                handle.loads.add(nbytes, seconds)

    def speeds(self) -> list[Speed | None]:
        """How quick loads of each tier were."""
        return [handle.loads.speed for handle in self._handles]

    def stats(self, wait: float = _USAGE_SECONDS) -> list[TierStats]:
        """Figures of each tier, from any thread.

        wait: most seconds for each to tell what it holds; else it is what it told last.
        """
        return [
            TierStats(
                name=handle.name,
                usage=self._usage(number, handle, wait),
                state=handle.breaker.state,
                trips=handle.breaker.trips,
                load=handle.loads.speed,
                store=handle.stores.speed,
                queue_drops={
                    reason: count
                    for (name, reason), count in dict(self._queue.drops).items()
                    if name == handle.name
                },
            )
            for number, handle in enumerate(self._handles)
        ]

    def _usage(self, number: int, handle: TierHandle, wait: float) -> TierUsage:
        """What a tier says of itself, or said last where it does not answer."""
        self._usages[number] = _within(handle.post(handle.tier.usage), wait) or self._usages[number]
        return self._usages[number]

    def wait(self, timeout: float) -> None:
        """Wait until some call of a tier has ended since the last `collect`, at most so many seconds."""
        self._woken.wait(timeout)

    def drain(self, timeout: float) -> Collection[Settled]:
        """Wait until what was queued is where it will be, at most so many seconds; what was settled."""
        end = time.monotonic() + timeout
        settled = self.collect()
        while self._queue.pending and time.monotonic() < end:
            self.wait(0.05)
            settled += self.collect()
        for future in [handle.post(handle.tier.drain) for handle in self._handles]:
            _within(future, end - time.monotonic())
        return settled

    def close(self, timeout: float = TIMEOUT_SECONDS) -> None:
        """Drain and close the tiers, at most so many seconds; harmless the second time."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + timeout
        self.drain(timeout)
        for handle in self._handles:
            handle.close(max(0.1, end - time.monotonic()))


def _done(call: Callable[[], None]) -> bool:
    """Make a call and say that it was made."""
    call()
    return True


def _within(future: Future[T], timeout: float) -> T | None:
    """The outcome of a call, None if it failed or took longer."""
    try:
        return future.result(max(0.0, timeout))
    except Exception:
        return None
