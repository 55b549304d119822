"""A thread that runs calls in order and never keeps the process from ending."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_NICENESS = 10


def step_back() -> None:
    """Let this thread have the processor when others do not want it: stores can wait, steps cannot.

    A batch thread does not interrupt others when it wakes: one that takes a core from a kernel's threads
    makes all of them wait for the last.
    """
    if hasattr(os, "setpriority"):
        with suppress(OSError):  # Linux counts niceness by thread; elsewhere, or forbidden, it is as it was
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def stand_by() -> None:
    """Let this thread run only where a processor has nothing else to do: nobody waits for it."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Worker:
    """One daemon thread. `concurrent.futures` would wait for a hung call when the interpreter exits."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """begin: called in the thread, before all others."""
        self._begin = begin
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call after those before it; cancelled at once after `close`."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # the caller's to see, in the future
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                future.cancel()
                future.set_running_or_notify_cancel()
            else:
                self._calls.put(run)
        return future

    def close(self, timeout: float | None = None) -> bool:
        """Take no more calls and wait for those there are; False if they took longer than that."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begin()
        while (call := self._calls.get()) is not None:
            call()
            del call  # its memory is the caller's to give back


def completed(value: T) -> Future[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[Any]:
    """A future that ended in an error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
