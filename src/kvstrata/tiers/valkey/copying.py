"""Copies between servers, behind everything else: what a server missed while it was away, and what it lacks
since it joined. Nobody waits for them; what fails is tried again some times while both servers are up, and
what there is no room for in the queue is not copied.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstrata.tiers.valkey.errors import ReplyError, ServerError
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.worker import step_back

_MOST_WAITING = 8192  # copies
_MOST_HINTS = 65536  # names for each server
_AT_ONCE = 4  # values
_MOST_TOUCHED = 4096  # names
_MOST_TRIES = 5
_FIRST_PAUSE = 0.1  # seconds until a copy that failed is tried again, twice as many each time
_DOWN_PAUSE = 1.0  # seconds between looks whether a server is back
_KEPT_SECONDS = 60.0  # that a copy waits for one
_FOR_EVER = -1  # PTTL's answer for a value without an end
_log = logging.getLogger("kvstrata.tiers")


class Hints:
    """What servers missed while they were away: names of values that others keep for them meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed: dict[str, OrderedDict[bytes, str]] = {}

    def add(self, server: str, name: bytes, keeper: str) -> None:
        """A server missed a value that `keeper` has; of too many the oldest is forgotten."""
        with self._lock:
            missed = self._missed.setdefault(server, OrderedDict())
            missed[name] = keeper
            if len(missed) > _MOST_HINTS:
                missed.popitem(last=False)

    def take(self, server: str) -> list[tuple[bytes, str]]:
        """All that a server missed, with who has it; forgotten from here on."""
        with self._lock:
            return list(self._missed.pop(server, {}).items())

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._missed.values()))


@dataclass
class _Copy:
    """A value on its way. repair: the target had missed it. until: given up then. tries: that failed."""

    source: Node
    target: Node
    name: bytes
    repair: bool
    until: float
    tries: int = 0


class Copying:
    """A thread that copies values from server to server and notes uses.

    due: the deadline of moving so many bytes.
    """

    def __init__(self, due: Callable[[int], float], stall: float) -> None:
        self._due = due
        self._stall = stall
        self._waiting: deque[_Copy] = deque()
        self._failed: list[tuple[float, int, _Copy]] = []  # a heap, by when they are tried again
        self._numbers = itertools.count()
        self._touched: deque[tuple[Node, list[bytes]]] = deque(maxlen=_MOST_TOUCHED)
        self._condition = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstrata-valkey-copy", daemon=True)
        self._thread.start()

    def add(self, source: Node, target: Node, names: Iterable[bytes], *, repair: bool) -> None:
        """Copy values later on. repair: the target had missed them, and is not only new."""
        until = time.monotonic() + _KEPT_SECONDS
        with self._condition:
            for name in names:
                if len(self._waiting) + len(self._failed) < _MOST_WAITING:
                    self._waiting.append(_Copy(source, target, name, repair, until))
            self._condition.notify_all()

    def touch(self, node: Node, names: list[bytes]) -> None:
        """Note a use of values later on."""
        with self._condition:
            self._touched.append((node, names))
            self._condition.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is to be done, at most so many seconds."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._closed or not (self._waiting or self._failed or self._touched or self._busy),
                timeout,
            )

    def close(self) -> None:
        """Leave what is to be done."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        step_back()
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                while not (self._closed or self._waiting or self._touched or self._due_again()):
                    self._condition.wait(self._failed[0][0] - time.monotonic() if self._failed else None)
                if self._closed:
                    return
                self._busy = True
                touched = self._touched.popleft() if self._touched else None
                batch = [] if touched else self._batch()
            try:
                if touched is not None:
                    touched[0].execute([("TOUCH", *touched[1])])
                else:
                    self._copy(batch)
            except ServerError:  # noted by the node
                self._try_again(batch)
            except Exception:
                _log.exception("copying between valkey servers failed")

    def _due_again(self) -> bool:
        """Put what is to be tried again behind what waits; whether there is any. The lock is held."""
        now, found = time.monotonic(), False
        while self._failed and self._failed[0][0] <= now:
            self._waiting.append(heapq.heappop(self._failed)[2])
            found = True
        return found

    def _batch(self) -> list[_Copy]:
        """The next copies with one source and one target. The lock is held."""
        batch = [self._waiting.popleft()]
        pair = (batch[0].source, batch[0].target)
        while self._waiting and len(batch) < _AT_ONCE:
            if (self._waiting[0].source, self._waiting[0].target) != pair:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _try_again(self, batch: list[_Copy]) -> None:
        """Keep what failed for later, or give it up: after some tries, of which waiting for a server that is
        down is none, or when its time is over.
        """
        now = time.monotonic()
        with self._condition:
            for copy in batch:
                up = copy.source.is_up and copy.target.is_up
                pause = _FIRST_PAUSE * 2**copy.tries if up else _DOWN_PAUSE
                copy.tries += up
                if copy.tries < _MOST_TRIES and now < copy.until:
                    heapq.heappush(self._failed, (now + pause, next(self._numbers), copy))

    def _copy(self, batch: list[_Copy]) -> None:
        source, target = batch[0].source, batch[0].target
        there = target.execute([("EXISTS", copy.name) for copy in batch])
        lacking = [copy for copy, answer in zip(batch, there, strict=True) if answer != 1]
        # A try whose answer did not come in time may have been one that succeeded.
        copied = sum(copy.tries > 0 for copy in batch) - sum(copy.tries > 0 for copy in lacking)
        if lacking:
            taken, refused = self._move(source, target, lacking)
            self._try_again(refused)
            copied += taken
        with target.lock:
            if batch[0].repair:
                target.figures.repairs += copied
            else:
                target.figures.copies += copied

    def _move(self, source: Node, target: Node, copies: list[_Copy]) -> tuple[int, list[_Copy]]:
        """Copy values from one server to the other, as far as they are there; how many it has now, and those
        that one of the two answered with an error. Raises ServerError.
        """
        due = self._due(0)
        with source.transfer(due) as connection:
            connection.begin(self._due(512 << 20), self._stall)
            connection.send([word for copy in copies for word in (("GET", copy.name), ("PTTL", copy.name))])
            replies = [connection.reply() for _ in range(2 * len(copies))]
        commands, sent, refused = [], [], []
        for copy, value, left in zip(copies, replies[::2], replies[1::2], strict=True):
            if isinstance(value, ReplyError) or isinstance(left, ReplyError):
                refused.append(copy)
            elif isinstance(value, bytes) and isinstance(left, int) and (left > 0 or left == _FOR_EVER):
                sent.append(copy)
                commands.append(("SET", copy.name, value, "NX", *(("PX", left) if left > 0 else ())))
        with target.transfer(due) as connection:
            connection.begin(self._due(512 << 20), self._stall)
            connection.send(commands)
            outcomes = [connection.reply() for _ in commands]
        failed = [
            copy for copy, outcome in zip(sent, outcomes, strict=True) if isinstance(outcome, ReplyError)
        ]
        return len(sent) - len(failed), refused + failed
