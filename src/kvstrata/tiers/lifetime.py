"""How long a stored block is served: by the monotonic clock while running, by the lesser of two later."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """Where a tier gets its times from, in seconds; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass(frozen=True)
class Lifetime:
    """A deadline in a form that outlives the process.

    written: wall time of writing. remaining: seconds left then. expires: wall time of the deadline; both
    infinite for what lives for ever.
    """

    written: float
    remaining: float
    expires: float

    @classmethod
    def until(cls, deadline: float, clocks: Clocks) -> Lifetime:
        """What to write now for a deadline by the monotonic clock."""
        now, remaining = clocks.wall(), max(0.0, deadline - clocks.monotonic())
        return cls(now, remaining, now + remaining)

    def deadline(self, clocks: Clocks, persisted: float = math.inf) -> float:
        """The deadline by this process's monotonic clock, when a store is opened.

        What remains is the least of what was last persisted (`remaining`, or `persisted` if that was written
        later) and of what the wall clock leaves: a wall clock set back cannot make a block live longer than
        it had left, and time passes while no process runs.
        """
        left = min(self.remaining, persisted, self.expires - clocks.wall())
        return math.inf if left == math.inf else clocks.monotonic() + left
