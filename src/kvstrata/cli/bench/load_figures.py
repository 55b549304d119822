"""From what clients saw to the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from kvstrata.cli.bench.load_client import Outcome

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Limits:
    """What a request must keep to be good, in seconds: time to first token, mean time between tokens."""

    ttft: float
    itl: float

    def kept(self, outcome: Outcome) -> bool:
        """Whether a request was answered, and in time."""
        if outcome.error is not None or outcome.ttft is None or outcome.ttft > self.ttft:
            return False
        return not outcome.gaps or fmean(outcome.gaps) <= self.itl


def milliseconds(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest of some times; None of none."""
    values = np.fromiter(seconds, dtype=np.float64) * 1e3
    if not values.size:
        return None
    named = {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def figures(outcomes: Sequence[Outcome], seconds: float, limits: Limits) -> dict[str, Any]:
    """Figures of a run that took so many seconds, first request to last answer."""
    answered = [each for each in outcomes if each.error is None]
    good = sum(limits.kept(each) for each in outcomes)
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    cached_tokens = sum(each.cached_tokens for each in answered)
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "errors": dict(Counter(each.error for each in outcomes if each.error is not None)),
        "seconds": seconds,
        "requests_per_second": len(answered) / seconds,
        "output_tok_s": sum(each.completion_tokens for each in answered) / seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "cached_share": cached_tokens / prompt_tokens if prompt_tokens else None,
        "ttft_ms": milliseconds(each.ttft for each in answered if each.ttft is not None),
        "itl_ms": milliseconds(gap for each in answered for gap in each.gaps),
        "e2e_ms": milliseconds(each.total for each in answered),
        "limits": {"ttft_ms": limits.ttft * 1e3, "itl_ms": limits.itl * 1e3},
        "good_share": good / len(outcomes),
        "goodput_requests_per_second": good / seconds,
        "sent_late_ms_max": max(each.late for each in outcomes) * 1e3,
    }
