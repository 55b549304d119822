"""How well a loaded model predicts a text: perplexity, over the same pool and decoder that serve requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.config import SamplingParams
from kvstrata.engine.llm import LLM
from kvstrata.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Quality:
    """tokens: how many were predicted. nll: the mean of their negative log-probabilities, in nats."""

    tokens: int
    nll: float

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)


def windows(ids: Sequence[int], window: int, prefix: Sequence[int]) -> list[list[int]]:
    """A text's tokens in pieces that are each predicted from their own beginning only.

    Each piece has at most `window` tokens, `prefix` (what the model wants in front of a text) included; a
    last piece without a token to predict is left out. Raises ConfigError for a window without room.
    """
    step = window - len(prefix)
    if step < 2:
        raise ConfigError(f"window is {window}; give at least {len(prefix) + 2} tokens")
    pieces = [[*prefix, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [piece for piece in pieces if len(piece) > 1]


def evaluate(
    llm: LLM, pieces: Sequence[Sequence[int]], progress: Callable[[int, int], None] | None = None
) -> Quality:
    """Predict each token of each piece but its first from those before it.

    progress: called with pieces done so far and their total. Raises RequestError where there is nothing to
    predict, or a piece cannot be served.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    logprobs: list[float] = []
    for result in llm.generate([list(piece) for piece in pieces], params, progress=progress):
        if result.error is not None:
            raise RequestError(f"text: {result.error}")
        known = result.prompt_logprobs or []
        for token, ranked in zip(result.prompt_token_ids[1:], known[1:], strict=True):
            if ranked is not None:
                logprobs.append(ranked[token].logprob)
    if not logprobs:
        raise RequestError("text has no token to predict; give a longer one")
    return Quality(len(logprobs), -math.fsum(logprobs) / len(logprobs))
