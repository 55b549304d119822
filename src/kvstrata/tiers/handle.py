"""One tier as the engine calls it: never waiting, with time-outs, a breaker and a meter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstrata.tiers.breaker import Breaker
from kvstrata.tiers.meter import Meter
from kvstrata.tiers.tier import Address, Identity, Loaded, Record, Stored, Tier
from kvstrata.tiers.worker import Worker, failed

T = TypeVar("T")

_KEEP = 0.7  # weight of what was known of look-ups at each new one
_TRY_ANYWAY = 32
_SLOWEST = 10e6  # bytes a second: what is slower is not worth waiting for


class TierUnavailableError(Exception):
    """The tier is left alone for now."""


class TierHandle:
    """Calls of a tier in a thread of its own; a future that fails is a tier that could not.

    timeout: seconds after which a call is given up, beside those that its bytes take. clock: seconds. woken:
    set whenever a call ends.
    """

    def __init__(
        self, tier: Tier, timeout: float, clock: Callable[[], float], woken: threading.Event
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.breaker = Breaker(clock)
        self.loads = Meter()
        self.stores = Meter()
        self._asking = 0.0  # seconds that a look-up took of late
        self._passed_over = 0
        self._timeout = timeout
        self._clock = clock
        self._woken = woken
        self._caller = Worker(f"kvstrata-{tier.name}")
        self._lock = threading.Lock()
        self._due: dict[Future[Any], float] = {}

    @property
    def takes(self) -> bool:
        """Whether blocks may be stored just now: it is not left alone, nor are all parts of it."""
        return self.breaker.state != "open" and bool(getattr(self.tier, "available", True))

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes]) -> Future[list[bool]]:
        """Ask which blocks are there."""
        if not self.breaker.allows(moves_bytes=False):
            return failed(TierUnavailableError(self.name))
        begin = self._clock()
        future = self._caller.submit(self.tier.lookup, addresses, segments)
        self._watch(future, 0)
        future.add_done_callback(lambda _: self._note_look_up(self._clock() - begin))
        return future

    def worth_asking(self, seconds: float) -> bool:
        """Whether a look-up is likely to take no longer; now and then one that is not is tried anyway."""
        if self._asking <= seconds:
            return True
        self._passed_over += 1
        return self._passed_over % _TRY_ANYWAY == 0

    def _note_look_up(self, seconds: float) -> None:
        self._asking = _KEEP * self._asking + (1 - _KEEP) * seconds

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        """Read blocks; see `Tier.load`."""
        if not self.breaker.allows():
            return failed(TierUnavailableError(self.name))
        nbytes = sum(memory.nbytes for memory in into)
        future = self._chained(self.tier.load, wanted, into)
        self._judge(future, nbytes, self.loads, lambda o: o.miss == "io_error", lambda o: o.miss is None)
        return future

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        """Keep blocks; see `Tier.store`."""
        if not self.breaker.allows():
            return failed(TierUnavailableError(self.name))
        nbytes = sum(record.payload.nbytes for record in records)
        future = self._chained(self.tier.store, records)
        self._judge(
            future, nbytes, self.stores, lambda o: o.dropped == "io_error", lambda o: o.dropped is None
        )
        return future

    def post(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make another call of the tier, after those before it."""
        if not self.breaker.allows(moves_bytes=False):
            return failed(TierUnavailableError(self.name))
        future = self._caller.submit(call, *arguments)
        self._watch(future, 0)
        return future

    def check(self) -> None:
        """Trip the breaker if a call takes too long."""
        now = self._clock()
        with self._lock:
            overdue = [future for future, due in self._due.items() if due <= now]
            for future in overdue:
                del self._due[future]
        if overdue:
            self.breaker.timed_out()

    def overdue_at(self, nbytes: int) -> float:
        """When a call that begins now and moves so many bytes is given up, by the clock."""
        return self._clock() + self._timeout + nbytes / _SLOWEST

    def close(self, timeout: float) -> bool:
        """Let the tier finish and close; False if it did not within so many seconds."""
        closing = self._caller.submit(self.tier.close)
        self._caller.close(timeout)
        return closing.done() and not closing.cancelled() and closing.exception() is None

    def _chained(self, call: Callable[..., Future[list[T]]], *arguments: Any) -> Future[list[T]]:
        """The future of what a call's future will bring; the call itself is made in the tier's thread."""
        outer: Future[list[T]] = Future()

        def finish(inner: Future[list[T]]) -> None:
            if inner.cancelled():
                outer.set_exception(TierUnavailableError(self.name))
            elif (error := inner.exception()) is not None:
                outer.set_exception(error)
            else:
                outer.set_result(inner.result())

        def called(calling: Future[Future[list[T]]]) -> None:
            if calling.cancelled():
                outer.set_exception(TierUnavailableError(self.name))
            elif (error := calling.exception()) is not None:
                outer.set_exception(error)
            else:
                calling.result().add_done_callback(finish)

        self._caller.submit(call, *arguments).add_done_callback(called)
        return outer

    def _judge(
        self,
        future: Future[list[T]],
        nbytes: int,
        meter: Meter,
        is_failure: Callable[[T], bool],
        moved: Callable[[T], bool],
    ) -> None:
        begin = self._clock()
        self._watch(future, nbytes)

        def judge(done: Future[list[T]]) -> None:
            outcomes = [] if done.exception() is not None else done.result()
            if not outcomes or any(map(is_failure, outcomes)):
                self.breaker.failed()
            else:
                self.breaker.succeeded()
                if all(moved(outcome) for outcome in outcomes):
                    meter.add(nbytes, self._clock() - begin)

        future.add_done_callback(judge)

    def _watch(self, future: Future[Any], nbytes: int) -> None:
        with self._lock:
            self._due[future] = self.overdue_at(nbytes)

        def ended(done: Future[Any]) -> None:
            with self._lock:
                self._due.pop(done, None)
            self._woken.set()

        future.add_done_callback(ended)
