"""Reading from a device or writing to it, as far as it fails: left alone for a while, told about once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstrata.tiers.breaker import LONGEST_PAUSE, Breaker

_log = logging.getLogger("kvstrata.tiers")


class Device:
    """A breaker that tells: one line when it begins to fail, for each kind of failure, and one when it works
    again.

    what: named in the log. clock: seconds, monotonic.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._breaker = Breaker(clock)
        self._lock = threading.Lock()
        self._failed_at = 0.0
        self._told: set[str] = set()

    def allows(self) -> bool:
        """Whether to try."""
        return self._breaker.allows()

    @property
    def is_open(self) -> bool:
        """Whether it failed of late, without asking for a probe."""
        return self._breaker.state == "open"

    def failed(self, error: Exception) -> None:
        """Something did not work."""
        self._failed_at = self._clock()
        self._breaker.failed()
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
        was_open = self._breaker.succeeded()
        if not self._told:
            return
        if was_open or self._clock() > self._failed_at + LONGEST_PAUSE:
            with self._lock:
                self._told.clear()
            _log.warning("%s works again", self._what)
