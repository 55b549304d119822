"""How well a loaded model predicts a text: perplexity, over the same pool and decoder that serve requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstrata.config import SamplingParams
from kvstrata.engine.llm import LLM
from kvstrata.errors import ConfigError, RequestError

Losses = tuple[float, ...]


@dataclass(frozen=True)
class Quality:
    """losses: of each piece, the negative log-probability in nats of each of its tokens but the first."""

    losses: tuple[Losses, ...]

    @property
    def tokens(self) -> int:
        """How many were predicted."""
        return sum(map(len, self.losses))

    @property
    def nll(self) -> float:
        """The mean loss, in nats."""
        return math.fsum(loss for piece in self.losses for loss in piece) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)

    def by_position(self, bucket: int) -> Iterator[tuple[int, float]]:
        """Perplexity of the tokens at the positions 1 to `bucket`, of those after, and so on.

        Gives the middle of each bucket, and its perplexity over all pieces.
        """
        longest = max(map(len, self.losses))
        for start in range(0, longest, bucket):
            end = min(start + bucket, longest)
            losses = [loss for piece in self.losses for loss in piece[start:end]]
            yield (start + 1 + end) // 2, math.exp(math.fsum(losses) / len(losses))


def windows(ids: Sequence[int], window: int, prefix: Sequence[int]) -> list[list[int]]:
    """A text's tokens in pieces that are each predicted from their own beginning only.

    Each piece has at most `window` tokens (0: as many as there are), `prefix` (what the model wants in front
    of a text) included; a last piece without a token to predict is left out. Raises ConfigError for a window
    without room.
    """
    step = window - len(prefix) if window else max(2, len(ids))
    if step < 2:
        raise ConfigError(f"window is {window}; give at least {len(prefix) + 2} tokens, or 0 for no windows")
    pieces = [[*prefix, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [piece for piece in pieces if len(piece) > 1]


def evaluate(llm: LLM, pieces: Sequence[Sequence[int]]) -> Quality:
    """Predict each token of each piece but its first from those before it.

    Raises RequestError where there is nothing to predict, or a piece cannot be served.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    losses: list[Losses] = []
    for result in llm.generate([list(piece) for piece in pieces], params):
        if result.error is not None:
            raise RequestError(f"text: {result.error}")
        known = zip(result.prompt_token_ids[1:], (result.prompt_logprobs or [])[1:], strict=True)
        losses.append(tuple(-ranked[token].logprob for token, ranked in known if ranked is not None))
    if not any(losses):
        raise RequestError("text has no token to predict; give a longer one")
    return Quality(tuple(losses))
