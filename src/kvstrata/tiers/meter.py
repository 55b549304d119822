"""How quick a tier is, from what its calls took: latency and bandwidth by least squares, the latest first."""

from __future__ import annotations

import threading
from dataclasses import dataclass

_KEEP = 0.9  # weight of what was known at each new call


@dataclass(frozen=True)
class Speed:
    """latency: seconds before the first byte. bandwidth: bytes a second after it."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: int) -> float:
        """Of a call that moves so many bytes."""
        return self.latency + nbytes / self.bandwidth


class Meter:
    """Fits `seconds = latency + bytes / bandwidth` to calls, older ones with less and less weight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """A call moved bytes in so many seconds."""
        x, y = float(nbytes), max(seconds, 1e-9)
        with self._lock:
            self._n = self._n * _KEEP + 1.0
            self._x = self._x * _KEEP + x
            self._y = self._y * _KEEP + y
            self._xx = self._xx * _KEEP + x * x
            self._xy = self._xy * _KEEP + x * y

    @property
    def speed(self) -> Speed | None:
        """What is known; None before the first call. All is bandwidth where calls are of one size."""
        with self._lock:
            n, x, y, xx, xy = self._n, self._x, self._y, self._xx, self._xy
        if not n or not x:
            return None
        spread = xx - x * x / n
        slope = (xy - x * y / n) / spread if spread > 1e-3 * xx else 0.0
        latency = (y - slope * x) / n
        if slope <= 0 or latency < 0:
            return Speed(0.0, x / y)
        return Speed(latency, 1.0 / slope)
