"""A request and its sequences, from arrival to the last token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from kvstrata.cache.keys import KeyChain
from kvstrata.cache.table import CacheSequence
from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.engine.outputs import Logprob, TierLoad
from kvstrata.engine.speculation.counts import DraftCounts
from kvstrata.engine.text import AnswerText
from kvstrata.tiers.stack import Lookup


class Status(Enum):
    """Where a sequence is: in the queue (new or preempted), coming from a tier, in the pool, or done."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Asked:
    """A question to the tiers: which blocks from position `first` on they have. at: by the engine's clock."""

    first: int
    at: float
    lookup: Lookup


@dataclass(eq=False)
class Request:
    """What a user asked for, and what is counted while it is served.

    arrival: submission, in seconds of the engine's clock. number: arrival order. limit: most tokens of a
    sequence, prompt included. stop_ids: tokens that end an answer. seed: for the draws of all its answers.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    arrival: float
    number: int
    limit: int
    stop_ids: frozenset[int]
    seed: int
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    cached_by_source: Counter[str] = field(default_factory=Counter)
    found_on_arrival: int = 0  # prompt tokens that the pool held
    counts_sources: bool = True  # until it is known what its first admission found
    drawn: bool = False  # whether it was drawn if what it found is to be refreshed
    loads: list[TierLoad] = field(default_factory=list)
    recomputed: Counter[str] = field(default_factory=Counter)
    speculation: DraftCounts = field(default_factory=DraftCounts)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every answer is done; answers that were to fork from an aborted first one never begin."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    @property
    def takes_hits(self) -> bool:
        """Log-probabilities of the prompt need every position's logits, hence its computation."""
        return self.params.prompt_logprobs is None

    @property
    def answers_to_fork(self) -> int:
        """Answers that do not have a sequence of their own yet."""
        return self.params.n - len(self.sequences)


@dataclass(eq=False)
class Sequence:
    """One answer in the making: its tokens, where its K and V are, and its text so far.

    chain: prompt and answer tokens with the keys of their full blocks, while not in the pool; in the pool
    the cache sequence carries the same object. waits_for: key of the block whose computation for another
    sequence it waits for. asked: what the tiers were asked for it.
    """

    request: Request
    index: int
    chain: KeyChain
    text: AnswerText
    status: Status = Status.WAITING
    cache: CacheSequence | None = None
    waits_for: bytes | None = None
    asked: Asked | None = None
    recomputes: bool = False  # a tier let it down: no more loads
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        return 0 if self.cache is None else self.cache.num_computed

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who goes first: lower priority value, then earlier arrival, then lower index."""
        return (self.request.options.priority, self.request.number, self.index)

    def append(self, token: int, now: float) -> None:
        """Add a sampled token."""
        self.output_ids.append(token)
        self.chain.extend((token,))
        self.token_times.append(now)
