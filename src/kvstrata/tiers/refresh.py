"""When an entry that expires is refreshed before it does: rarely while there is time, surely towards the end.

XFetch (Vattani, Chierichetti, Lowenstein, "Optimal Probabilistic Cache Stampede Prevention", PVLDB 8(8),
2015, section 3): each request that finds the entry refreshes it with probability exp(-remaining / (beta *
delta)), so that one of many requests does, about when recomputing still ends before the entry does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import sha256

BETA = 1.0


def uniform(seed: int, counter: int) -> float:
    """A number in (0, 1] that depends on its two arguments alone, each up to 64 bits."""
    digest = sha256(seed.to_bytes(8, "little") + counter.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest[:7], "little") % 2**53 + 1) / 2**53


def refresh_probability(remaining: float, delta: float, beta: float = BETA) -> float:
    """exp(-remaining / (beta * delta)), and 1 for what has expired.

    remaining: seconds until the entry expires. delta: seconds that it takes to compute again. beta: above 1
    earlier, below 1 later, 0 not before it has expired.
    """
    if remaining <= 0:
        return 1.0
    scale = beta * delta
    return math.exp(-remaining / scale) if scale > 0 else 0.0


class EarlyRefresh:
    """Draws for each request whether what it found is to be refreshed now.

    beta: see `refresh_probability`; 0 switches it off. seed: other processes draw other numbers. clock:
    seconds, that of the deadlines.
    """

    def __init__(self, beta: float, *, seed: int, clock: Callable[[], float]) -> None:
        self._beta = beta
        self._seed = seed
        self._clock = clock
        self._draws = 0

    @property
    def enabled(self) -> bool:
        return self._beta > 0

    def due(self, deadline: float, delta: float) -> bool:
        """One draw for a request. deadline: the earliest of all that it found, infinite if nothing of it
        expires. delta: seconds to compute it again.
        """
        if not self.enabled or deadline == math.inf:
            return False
        self._draws += 1
        probability = refresh_probability(deadline - self._clock(), delta, self._beta)
        return uniform(self._seed, self._draws) <= probability


def prolongs(old: float, new: float, now: float) -> bool:
    """Whether it is worth writing an entry anew for a later deadline: if less than half of that life is left.

    old, new: deadlines by the same clock as `now`.
    """
    return old - now < (new - now) / 2
