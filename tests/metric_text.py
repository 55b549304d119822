"""Samples out of what `/metrics` tells."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from served import ToyServer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: ToyServer) -> Samples:
    """Every sample by name and labels, without kvstrata's prefix."""
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name.removeprefix("kvstrata:"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    found = [
        value for (sample, own), value in samples.items() if sample == name and own.issuperset(labels.items())
    ]
    assert found, f"there is no {name} {labels}"
    return sum(found)
