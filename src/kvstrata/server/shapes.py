"""What clients get: the field's response bodies."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """cached_tokens: prompt tokens whose K and V were not computed for this request."""

    cached_tokens: int


class UsageBody(TypedDict):
    """Tokens of a request, all its prompts and answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(TypedDict):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, with the likeliest tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat answer."""

    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, the prompt's first where it is echoed; its first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ChatMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(TypedDict):
    """A chat's answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class CompletionChoice(TypedDict):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class Completion(TypedDict):
    """Answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class ModelCard(TypedDict):
    """A model. max_model_len: most tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(TypedDict):
    """What went wrong, whose mistake it is, in which field, and what to branch on."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """An error."""

    error: ErrorDetail


class PoolUsage(TypedDict):
    """Blocks of one layer group, and their bytes together."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_bytes: int
    evictions: dict[str, int]


class TierUsageBody(TypedDict):
    """What a tier below the pool holds, and has done since the server's start. state: of its breaker.

    servers: of a tier that is on several, by name the state of each one's breaker.
    """

    name: str
    state: str
    used_bytes: int
    capacity_bytes: int | None
    blocks: int
    stored_blocks: int
    loaded_blocks: int
    evictions: dict[str, int]
    servers: dict[str, str]


class PrefixUsage(TypedDict):
    """A prefix that requests found in the pool. first_words: only where the operator lets them be shown."""

    key: str
    tokens: int
    hits: int
    first_words: NotRequired[str]


class CacheUsage(TypedDict):
    """The cache now, and since the server's start.

    usage: share of the pool's blocks that requests hold; filled: share that requests hold or that are cached.
    hit_ratio: share of prompt tokens that were not computed (None: no request is finished yet);
    recent_hit_ratio: of the last five minutes. eviction_rate: blocks a second, of the last minute.
    thrashed_tokens: computed again soon after their eviction. top_prefixes: for the admin only where there
    are API keys.
    """

    usage: float
    filled: float
    block_size: int
    pool: list[PoolUsage]
    tiers: list[TierUsageBody]
    requests_running: int
    requests_waiting: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: dict[str, int]
    hit_ratio: float | None
    recent_hit_ratio: float
    eviction_rate: float
    thrashed_tokens: int
    top_prefixes: NotRequired[list[PrefixUsage]]


class ResetDone(TypedDict):
    """The pool was cleared. tiers: whether the tiers were, too; silent: those of them that did not say so."""

    status: Literal["ok"]
    tiers: bool
    silent: list[str]


class MembersChanged(TypedDict):
    """changed: false where these were the servers already. servers: by name."""

    status: Literal["ok"]
    changed: bool
    servers: list[str]


class Pinned(TypedDict):
    """tokens: how many of the prompt are kept, its full blocks at most."""

    status: Literal["ok"]
    tokens: int


class Unpinned(TypedDict):
    """found: whether there was such a pin."""

    status: Literal["ok"]
    found: bool


class Live(TypedDict):
    """Whether the server works."""

    status: Literal["ok", "ready", "failed", "draining"]
