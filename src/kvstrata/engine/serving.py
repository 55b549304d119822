"""The thread that steps an engine, and the ways into it and out of it.

Others hand it requests and commands through a bounded inbox and read answers from outboxes. The thread looks
at the inbox between steps, so that an abort takes effect within one step; where nothing is to be done, it
sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.engine.engine import Engine
from kvstrata.engine.outbox import Outbox
from kvstrata.errors import KVStrataError, OverloadedError, StoppedError

T = TypeVar("T")
_TEND_SECONDS = 0.2  # how soon an idle engine looks at its tiers again while they are being stored to
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submission:
    """A request for `Engine.add_request`. arrival: by the engine's clock (None: when the engine gets it)."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None = None
    options: RequestOptions | None = None
    arrival: float | None = None


class Serving:
    """Steps an engine in a thread of its own; all methods may be called from any thread.

    max_open: most requests that are submitted and not finished. When a step raises, every request ends with
    that, and so does what is submitted later: the engine's state is no longer to be trusted.
    """

    def __init__(self, engine: Engine, *, max_open: int) -> None:
        self._engine = engine
        self._max_open = max_open
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()  # guarded by the condition, like the four below
        self._open = 0
        self._stopping = False
        self._ended = False
        self._error: BaseException | None = None
        self._outboxes: dict[str, Outbox] = {}  # the engine thread's own
        self._untended = True
        self._thread = threading.Thread(target=self._run, name="kvstrata-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and no step has failed."""
        return self._error is None and not self._ended and self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What a step failed with, if one has."""
        return self._error

    @property
    def open_requests(self) -> int:
        """Requests submitted and not finished."""
        return self._open

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place in a step."""
        return len(self._engine.scheduler.waiting)

    @property
    def running(self) -> int:
        """Sequences that have their place in the pool."""
        return len(self._engine.scheduler.running)

    def submit(self, submission: Submission, outbox: Outbox) -> None:
        """Hand in a request; its deltas, or the error it is refused with, go to `outbox`.

        Raises OverloadedError where too many are open, and StoppedError where the engine does not serve.
        """
        with self._condition:
            self._check_serving()
            if self._open >= self._max_open:
                raise OverloadedError(
                    f"{self._open} requests are being served or wait, as many as may; try again later"
                )
            self._open += 1
            self._inbox.append(lambda: self._add(submission, outbox))
            self._condition.notify()

    def abort(self, request_id: str) -> None:
        """End a request before the next step, if it is still being served; its last delta says so."""
        with self._condition:
            if not self._ended:
                self._inbox.append(lambda: self._abort(request_id))
                self._condition.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something on the engine's thread between two steps, where it may look at and change the cache.

        Raises StoppedError where the engine does not serve.
        """
        future: Future[T] = Future()
        with self._condition:
            self._check_serving()
            self._inbox.append(lambda: self._answer(function, future))
            self._condition.notify()
        return future

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the step it is in; open requests end with StoppedError.

        Returns False where it still runs after `timeout` seconds.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_serving(self) -> None:
        if self._stopping or self._ended:
            raise self._last_words()

    def _last_words(self) -> StoppedError:
        if self._error is not None:
            return StoppedError(f"the engine has failed ({_named(self._error)}); restart the server")
        return StoppedError("the engine is shutting down")

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                self._obey()
                if self._engine.has_unfinished:
                    self._step()
                    self._untended = True
                elif not self._inbox:
                    self._untended = self._engine.tend()
        except BaseException as error:
            _log.critical("the engine has failed: %s", _named(error), exc_info=error)
            self._error = error
        finally:
            self._end()

    def _wait(self) -> bool:
        """Sleep where nothing is to be done; False: stop."""
        with self._condition:
            while not (self._inbox or self._stopping or self._engine.has_unfinished or self._untended):
                self._untended = self._engine.settling
                self._condition.wait(_TEND_SECONDS if self._untended else None)
            return not self._stopping

    def _obey(self) -> None:
        """Do what others asked for, one by one, so that a failure leaves the rest in the inbox."""
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()

    def _add(self, submission: Submission, outbox: Outbox) -> None:
        try:
            self._check_serving()
            self._engine.add_request(
                submission.request_id,
                submission.prompt_token_ids,
                submission.params,
                prompt=submission.prompt,
                options=submission.options,
                arrival=submission.arrival,
            )
        except Exception as error:
            self._closed(1)
            _fail([outbox], error)
            if not isinstance(error, KVStrataError):
                raise  # a defect
        else:
            self._outboxes[submission.request_id] = outbox

    def _abort(self, request_id: str) -> None:
        if request_id in self._outboxes and not self._ended:
            self._engine.abort(request_id)

    def _answer(self, function: Callable[[], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._check_serving()
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _step(self) -> None:
        ready: list[Outbox] = []
        finished = 0
        for delta in self._engine.step():
            outbox = self._outboxes.get(delta.request_id)
            if outbox is None:
                continue
            if outbox.put(delta):
                ready.append(outbox)
            if delta.result is not None:
                del self._outboxes[delta.request_id]
                finished += 1
        self._closed(finished)
        _wake(ready)

    def _closed(self, count: int) -> None:
        if count:
            with self._condition:
                self._open -= count

    def _end(self) -> None:
        """Leave nobody waiting: neither those being served, nor what lies in the inbox."""
        with self._condition:
            self._ended = True  # from here on nothing is added to the inbox
        self._obey()
        outboxes = list(self._outboxes.values())
        self._outboxes.clear()
        self._closed(len(outboxes))
        _fail(outboxes, self._last_words())


def _fail(outboxes: Iterable[Outbox], error: Exception) -> None:
    _wake([outbox for outbox in outboxes if outbox.fail(error)])


def _wake(outboxes: Sequence[Outbox]) -> None:
    """Wake readers, with one call into each event loop however many they are."""
    loops: dict[asyncio.AbstractEventLoop, list[Outbox]] = {}
    for outbox in outboxes:
        loops.setdefault(outbox.loop, []).append(outbox)
    for loop, woken in loops.items():
        with suppress(RuntimeError):  # its loop is closed: nobody reads any more
            loop.call_soon_threadsafe(_wake_all, woken)


def _wake_all(outboxes: Sequence[Outbox]) -> None:
    for outbox in outboxes:
        outbox.wake()


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
