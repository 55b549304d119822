"""A failing device is left alone for a while, and talked about once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

FAILURES = 3  # in a row that open a breaker
FIRST_PAUSE = 1.0  # seconds, doubled by each failed probe
LONGEST_PAUSE = 60.0

_log = logging.getLogger("kvstrata.tiers")


class Breaker:
    """Closed while things work; after failures in a row open, with one probe let through after each pause.

    what: named in the log, which has one line when it begins to fail, for each kind of failure, and one when
    it works again.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0
        self._failed_at = 0.0
        self._told: set[str] = set()

    def allows(self) -> bool:
        """Whether to try; of those who ask after a pause, one is told yes and the others after the next."""
        with self._lock:
            if self._failures < FAILURES:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._pause
            return True

    @property
    def is_open(self) -> bool:
        """Whether things failed of late, without asking for a probe."""
        return self._failures >= FAILURES and self._clock() < self._retry_at

    def failed(self, error: Exception) -> None:
        """Something did not work."""
        with self._lock:
            self._failures += 1
            self._failed_at = self._clock()
            if self._failures >= FAILURES:
                if self._failures > FAILURES:
                    self._pause = min(2 * self._pause, LONGEST_PAUSE)
                self._retry_at = self._failed_at + self._pause
        self.mention(error)

    def mention(self, error: Exception) -> None:
        """Say that something is wrong, once for each kind."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        with self._lock:
            known = reason in self._told
            self._told.add(reason)
        if not known:
            _log.warning("%s fails: %s; answers do not depend on it, hits do", self._what, reason)

    def succeeded(self) -> None:
        """Something worked: after a pause, or a quiet time, all is well again."""
        if not self._told:
            return
        with self._lock:
            was_open = self._failures >= FAILURES
            self._failures, self._pause = 0, FIRST_PAUSE
            recovered = was_open or self._clock() > self._failed_at + LONGEST_PAUSE
            if recovered:
                self._told.clear()
        if recovered:
            _log.warning("%s works again", self._what)
