"""Takes the memory of pools from the system ahead of the blocks that are written next.

A pool costs nothing before it is written, but the first write to a page then waits for it: in a virtual
machine for milliseconds a huge page, 5 to 8 % of a long prompt. So some memory beyond what was ever used is
made ready at start, and again whenever the engine has nothing else to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstrata.cache.pool import BlockPool
from kvstrata.tiers.memory import is_short

_AHEAD_BYTES: Final = 256 << 20  # of all pools together
_PORTION_BYTES: Final = 2 << 20  # a request waits for one at most
_START_SECONDS: Final = 0.25


class PoolPages:
    """Keeps memory ready for the next blocks of pools on the CPU; pools on other devices have theirs."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = list(pools)
        self._ready = [0] * len(pools)  # blocks from the first on whose memory is there
        self._lock = threading.Lock()

    def prepare(self, threads: int, seconds: float = _START_SECONDS) -> None:
        """Make ready what is kept ready, by so many threads, for at most so many seconds."""
        end = time.monotonic() + seconds

        def work() -> None:
            while time.monotonic() < end and self.step():
                pass

        with ThreadPoolExecutor(threads) as executor:
            for future in [executor.submit(work) for _ in range(threads)]:
                future.result()

    def step(self) -> bool:
        """Make a portion ready; whether there was one to be made.

        Ends for good where the system cannot do this; does nothing while memory is short.
        """
        portion = None if is_short() else self._claim()
        if portion is None:
            return False
        pool, blocks = portion
        if not pool.populate(blocks):
            with self._lock:
                self._pools.clear()
            return False
        return True

    def _claim(self) -> tuple[BlockPool, range] | None:
        """The next blocks of the pool that has the least ready, if any has too little."""
        with self._lock:
            wanting: list[tuple[int, int]] = []
            for number, pool in enumerate(self._pools):
                self._ready[number] = max(self._ready[number], pool.reached)
                ahead = (self._ready[number] - pool.reached) * pool.layout.stride_bytes
                if self._ready[number] < pool.num_blocks and ahead < _AHEAD_BYTES // len(self._pools):
                    wanting.append((ahead, number))
            if not wanting:
                return None
            _, number = min(wanting)
            pool, first = self._pools[number], self._ready[number]
            last = min(first + max(1, _PORTION_BYTES // pool.layout.stride_bytes), pool.num_blocks)
            self._ready[number] = last
            return pool, range(first, last)
