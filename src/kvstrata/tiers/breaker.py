"""When to leave something that fails alone: after failures in a row or a time-out, and when to try again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]

FAILURES = 3  # in a row, until it is left alone
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds


class Breaker:
    """Closed: all calls go. Open: none, for a pause that doubles each time. Half-open: one, to see.

    A probe of which nothing is heard stands in the way of the next for one pause only. Any thread may use it.
    clock: seconds, monotonic. failures: in a row, until it opens. first_pause, longest_pause: seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures: int = FAILURES,
        first_pause: float = FIRST_PAUSE,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._limit = failures
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._failures = 0
        self._pause = first_pause
        self._until: float | None = None
        self._probing_until = float("-inf")
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
            now = self._clock()
            if now < self._until or (moves_bytes and now < self._probing_until):
                return False
            if moves_bytes:
                self._probing_until = now + self._pause
            return True

    def succeeded(self) -> bool:
        """A call that moves bytes did; whether it had been left alone until now."""
        with self._lock:
            was_open = self._until is not None
            self._failures, self._pause, self._until = 0, self._first_pause, None
            self._probing_until = float("-inf")
            return was_open

    def failed(self) -> None:
        """A call failed."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit or self._until is not None:
                self._trip()

    def timed_out(self) -> None:
        """A call takes too long."""
        with self._lock:
            if self._until is None or self._clock() >= self._until:
                self._trip()

    def _trip(self) -> None:
        if self._until is not None:
            self._pause = min(2 * self._pause, self._longest_pause)
        self._until = self._clock() + self._pause
        self._probing_until = float("-inf")
        self.trips += 1
