"""What this machine can do at best, measured in the run that compares something with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvstrata.kernels.memory import huge_pages

_READ_BYTES = 256 << 20  # far more than caches hold
_PRODUCT_SIZE = 1024


class ReadBandwidth:
    """Reads memory by torch's sum. `run` reads once, `rate` is GB/s for the seconds that it took.

    The memory is in huge pages, as weights and pools are: in others it reads a fifth slower.
    """

    def __init__(self) -> None:
        self._memory = huge_pages(_READ_BYTES).view(torch.float32).fill_(1.0)
        self.run: Callable[[], object] = self._memory.sum

    def rate(self, seconds: float) -> float:
        """GB/s."""
        return self._memory.nbytes / seconds / 1e9


class FloatProduct:
    """Multiplies float32 matrices by torch. `run` does it once, `rate` is GFLOP/s for the seconds it took."""

    def __init__(self) -> None:
        left, right = torch.randn(2, _PRODUCT_SIZE, _PRODUCT_SIZE)
        self.run: Callable[[], object] = lambda: left @ right

    def rate(self, seconds: float) -> float:
        """GFLOP/s."""
        return 2 * _PRODUCT_SIZE**3 / seconds / 1e9


class ByteProduct:
    """Multiplies int8 matrices by torch, sums in int32. `rate` is in 10^9 operations/s, two a product.

    The second lies as weights do, `[out_features, in_features]`: torch multiplies that fastest.
    """

    def __init__(self) -> None:
        left, right = torch.randint(-127, 128, (2, _PRODUCT_SIZE, _PRODUCT_SIZE)).to(torch.int8)
        self.run: Callable[[], object] = lambda: torch._int_mm(left, right.t())

    def rate(self, seconds: float) -> float:
        """10^9 operations/s."""
        return 2 * _PRODUCT_SIZE**3 / seconds / 1e9


def best(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the best of so many runs, after one that does not count."""
    return alternately((run,), repeats)[0]


def alternately(runs: tuple[Callable[[], object], ...], repeats: int) -> list[float]:
    """Seconds of the best run of each, taken in turns so that all meet the same machine."""
    for run in runs:
        run()
    least = [float("inf")] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            least[index] = min(least[index], time.perf_counter() - began)
    return least
