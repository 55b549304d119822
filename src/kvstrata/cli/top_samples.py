"""What `/metrics` tells, read: samples, what they grew by between two readings, quantiles of histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "kvstrata:"
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Samples:
    """One reading of Prometheus' text format. at: seconds by the reader's clock."""

    at: float
    rows: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float | None:
        """Sum over the samples of a name that have these labels; None where there are none."""
        found = [
            value for given, value in self.rows.get(PREFIX + name, ()) if labels.items() <= given.items()
        ]
        return sum(found) if found else None

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label, in the order in which they come."""
        sums: dict[str, float] = {}
        for given, value in self.rows.get(PREFIX + name, ()):
            if label in given:
                sums[given[label]] = sums.get(given[label], 0.0) + value
        return sums

    def label(self, name: str, label: str) -> str | None:
        """The value of a label of the first sample that has it."""
        return next((given[label] for given, _ in self.rows.get(PREFIX + name, ()) if label in given), None)


def read(text: str, at: float) -> Samples:
    """Samples of a page; lines that are none are passed over."""
    rows: dict[str, list[tuple[Labels, float]]] = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        rows.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), value))
    return Samples(at, rows)


def growth(old: Samples, new: Samples, name: str, **labels: str) -> float | None:
    """What a counter grew by; from 0 where the server was started anew. None where it is not told."""
    now = new.value(name, **labels)
    if now is None:
        return None
    before = old.value(name, **labels) or 0.0
    return now - before if now >= before else now


def rate(old: Samples, new: Samples, name: str, **labels: str) -> float | None:
    """What a counter grew by in a second; None where no time has passed."""
    grown, seconds = growth(old, new, name, **labels), new.at - old.at
    return None if grown is None or seconds <= 0 else grown / seconds


def quantiles(
    old: Samples | None, new: Samples, name: str, shares: tuple[float, ...]
) -> tuple[float, ...] | None:
    """Quantiles of a histogram's observations between two readings (old None: of all), None without any.

    As Prometheus' histogram_quantile: linear inside a bucket; the last bound for what lies beyond it.
    """
    bounds = new.labelled(f"{name}_bucket", "le")
    before = {} if old is None else old.labelled(f"{name}_bucket", "le")
    if any(before.get(bound, 0.0) > count for bound, count in bounds.items()):
        before = {}  # a server started anew
    rows = sorted((float(bound), count - before.get(bound, 0.0)) for bound, count in bounds.items())
    if not rows or rows[-1][1] <= 0:
        return None
    return tuple(_quantile(rows, share) for share in shares)


def _quantile(rows: list[tuple[float, float]], share: float) -> float:
    wanted = share * rows[-1][1]
    low, below = 0.0, 0.0
    for bound, count in rows:
        if count >= wanted and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
