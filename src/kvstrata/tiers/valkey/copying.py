"""Copies between servers, behind everything else: what a server missed while it was away, and what it lacks
since it joined. Nobody waits for them; what there is no room for in the queue is not copied.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from kvstrata.tiers.valkey.errors import ReplyError, ServerError
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.worker import step_back

_MOST_WAITING = 8192  # copies
_MOST_HINTS = 65536  # names for each server
_AT_ONCE = 4  # values
_MOST_TOUCHED = 4096  # names
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


class Copying:
    """A thread that copies values from server to server and notes uses.

    due: the deadline of moving so many bytes.
    """

    def __init__(self, due: Callable[[int], float], stall: float) -> None:
        self._due = due
        self._stall = stall
        self._waiting: deque[tuple[Node, Node, bytes, bool]] = deque()
        self._touched: deque[tuple[Node, list[bytes]]] = deque(maxlen=_MOST_TOUCHED)
        self._condition = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstrata-valkey-copy", daemon=True)
        self._thread.start()

    def add(self, source: Node, target: Node, names: Iterable[bytes], *, repair: bool) -> None:
        """Copy values later on. repair: the target had missed them, and is not only new."""
        with self._condition:
            for name in names:
                if len(self._waiting) < _MOST_WAITING:
                    self._waiting.append((source, target, name, repair))
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
                lambda: self._closed or not (self._waiting or self._touched or self._busy), timeout
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
                self._condition.wait_for(lambda: self._closed or self._waiting or self._touched)
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
            except ServerError:
                pass  # noted by the node; the values are copied when they are next asked for
            except Exception:
                _log.exception("copying between valkey servers failed")

    def _batch(self) -> list[tuple[Node, Node, bytes, bool]]:
        """The next copies with one source and one target."""
        batch = [self._waiting.popleft()]
        while self._waiting and len(batch) < _AT_ONCE and self._waiting[0][:2] == batch[0][:2]:
            batch.append(self._waiting.popleft())
        return batch

    def _copy(self, batch: list[tuple[Node, Node, bytes, bool]]) -> None:
        source, target, _, repair = batch[0]
        names = [name for _, _, name, _ in batch]
        there = target.execute([("EXISTS", name) for name in names])
        names = [name for name, answer in zip(names, there, strict=True) if answer == 0]
        if not names:
            return
        due = self._due(0)
        with source.transfer(due) as connection:
            connection.begin(self._due(512 << 20), self._stall)
            connection.send([word for name in names for word in (("GET", name), ("PTTL", name))])
            replies = [connection.reply() for _ in range(2 * len(names))]
        commands = []
        for name, value, left in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(value, bytes) and isinstance(left, int) and left != 0:
                commands.append(("SET", name, value, "NX", *(("PX", left) if left > 0 else ())))
        with target.transfer(due) as connection:
            connection.begin(self._due(512 << 20), self._stall)
            connection.send(commands)
            outcomes = [connection.reply() for _ in commands]
        copied = sum(not isinstance(outcome, ReplyError) for outcome in outcomes)
        with target.lock:
            if repair:
                target.figures.repairs += copied
            else:
                target.figures.copies += copied
