"""What a request gives back: texts, tokens, log-probabilities, usage and timings."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.engine.speculation.counts import DraftCounts


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token (nats) under the model's own distribution, and its rank (1 is likeliest)."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; cached_tokens are prompt tokens whose K and V were not computed for it.

    cached_by_source: of those, how many came from where (`pool`: found there on arrival; `shared`: being
    computed just then for another request; or the name of a tier).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TierLoad:
    """Blocks that a request had from a tier. bytes: of those that came; seconds: of the whole load."""

    tier: str
    blocks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Timings:
    """Times of a request in seconds.

    queue: submission to first scheduling. ttft: submission to the first token. inter_token: between the
    tokens of the first answer. total: submission to the last token of all answers. loads: from the tiers, in
    order. recomputed: tokens that no tier brought, by reason: `absent` from all, `cost` (quicker to compute),
    `failed` (found, but not there any more, not verified, or late). speculation: tokens proposed for all
    answers, and accepted.
    """

    queue: float
    ttft: float
    inter_token: tuple[float, ...]
    total: float
    preemptions: int = 0
    loads: tuple[TierLoad, ...] = ()
    recomputed: dict[str, int] = field(default_factory=dict)
    speculation: DraftCounts = field(default_factory=DraftCounts)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second of the first answer after its first token; None with fewer than two tokens."""
        span = sum(self.inter_token)
        return len(self.inter_token) / span if span > 0 else None


@dataclass(frozen=True)
class CompletionOutput:
    """One finished answer. finish_reason: `stop`, `length`, `abort` or `error`.

    stop_reason: the stop text or stop token id that ended it (None for the model's own end token).
    logprobs: for each token, the asked-for likeliest tokens and the token itself.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. prompt is None where token ids were given; error tells why a request failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    usage: Usage
    timings: Timings
    error: str | None = None


@dataclass(frozen=True)
class Delta:
    """New text and tokens of one answer since the last delta.

    text never ends in half a character and never holds part of a stop text that may still complete.
    prompt_logprobs: on an answer's first delta, where they were asked for. result is set on the last delta of
    a request, when all its answers are finished.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    result: RequestOutput | None = None
