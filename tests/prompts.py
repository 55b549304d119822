"""Prompts by number, the same in every process."""

from __future__ import annotations

import random

from kvstrata import SamplingParams

ANSWER = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
TOKENS = 70  # four full blocks of 16, and some


def prompt_of(number: int) -> list[int]:
    """Token ids of a prompt."""
    draw = random.Random(number)
    return [draw.randrange(100, 40_000) for _ in range(TOKENS)]
