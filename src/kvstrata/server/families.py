"""Prometheus' families of samples, under kvstrata's prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvstrata.engine.histogram import Counts

PREFIX = "kvstrata:"


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A number that goes up and down."""
    return GaugeMetricFamily(PREFIX + name, text, value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """A number that only grows; its sample is called `name_total`."""
    return CounterMetricFamily(PREFIX + name, text, value)


def gauges(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """A gauge for each row of label values."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counters(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    """A counter for each row of label values."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def by(counts: Mapping[str, float], always: Iterable[str] = ()) -> list[tuple[tuple[str], float]]:
    """Rows of one label. always: values that are there at 0 too, so that a rate has a beginning."""
    return [((value,), count) for value, count in {**dict.fromkeys(always, 0), **counts}.items()]


def histogram(name: str, text: str, values: Counts) -> HistogramMetricFamily:
    """A histogram, with cumulative buckets."""
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(values.counts), strict=True))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=values.total)
