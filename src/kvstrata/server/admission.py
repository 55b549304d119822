"""How many requests may be open at once, in all and for each key, and when to come back otherwise."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from kvstrata.server.problems import ApiError

_LONGEST_WAIT = 60  # seconds that a client is told to stay away at most


class Admission:
    """Counts open requests; used in the event loop only.

    limit: most of them in all. per_key: most of one key (None: any number).
    """

    def __init__(self, limit: int, per_key: int | None) -> None:
        self._limit = limit
        self._per_key = per_key
        self._open: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds = 1.0  # how long requests take, lately
        self.draining = False

    @property
    def open(self) -> int:
        """Requests that are open now."""
        return self._open.total()

    def enter(self, key: str, count: int) -> None:
        """Let `count` requests in. Raises ApiError where they are too many, and while the server stops."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        if self._per_key is not None and self._open[key] + count > self._per_key:
            raise ApiError(
                429,
                f"{self._open[key]} requests of this key are open and {count} more are asked for; "
                f"at most {self._per_key} may be (max_requests_per_key)",
                code="too_many_requests",
                retry_after=self._retry_after(),
            )
        if self.open + count > self._limit:
            raise ApiError(
                429,
                f"{self.open} requests are being served or wait, as many as may (max_queue): try again later",
                code="queue_full",
                retry_after=self._retry_after(),
            )
        self._open[key] += count
        self._idle.clear()

    def leave(self, key: str, count: int, seconds: float) -> None:
        """Requests that were let in have ended after so many seconds."""
        self._seconds += 0.1 * (seconds - self._seconds)
        self._open[key] -= count
        if not self._open[key]:
            del self._open[key]
        if not self._open:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def _retry_after(self) -> int:
        return min(max(1, math.ceil(self._seconds)), _LONGEST_WAIT)
