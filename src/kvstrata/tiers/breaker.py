"""When to leave a tier alone: after failures in a row or a time-out, and when to try again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]

_FAILURES = 3  # in a row, until a tier is left alone
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds


class Breaker:
    """Closed: all calls go. Open: none, for a pause that doubles each time. Half-open: one, to see.

    Any thread may use it. clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._until: float | None = None
        self._probing = False
        self.trips = 0

    @property
    def state(self) -> State:
        """As it is now."""
        with self._lock:
            if self._until is None:
                return "closed"
            return "open" if self._clock() < self._until else "half-open"

    def allows(self, *, moves_bytes: bool = True) -> bool:
        """Whether a call may go. When half-open, of those that move bytes one, whose outcome decides."""
        with self._lock:
            if self._until is None:
                return True
            if self._clock() < self._until or (moves_bytes and self._probing):
                return False
            self._probing = self._probing or moves_bytes
            return True

    def succeeded(self) -> None:
        """A call that moves bytes did."""
        with self._lock:
            self._failures, self._pause, self._until, self._probing = 0, _FIRST_PAUSE, None, False

    def failed(self) -> None:
        """A call failed."""
        with self._lock:
            self._failures += 1
            if self._failures >= _FAILURES or self._until is not None:
                self._trip()

    def timed_out(self) -> None:
        """A call takes too long."""
        with self._lock:
            if self._until is None or self._clock() >= self._until:
                self._trip()

    def _trip(self) -> None:
        if self._until is not None:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._until = self._clock() + self._pause
        self._probing = False
        self.trips += 1
