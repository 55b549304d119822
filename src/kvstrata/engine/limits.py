"""How long a request's sequences may be, by model, pool and retention."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import Retention
from kvstrata.errors import ConfigError, RequestError

MAX_POSITIONS = 2**31 - 2**16  # what the kernels count, with room for a step


def check_reach(retention: Retention, most: int) -> None:
    """Raise ConfigError where a query would see tokens further away than the model was made for."""
    if retention.unhidden is not None and retention.unhidden > most:
        raise ConfigError(
            f"retention is {str(retention)!r}, which reaches over {retention.unhidden} tokens; the model was "
            f"made for {most}: give a smaller window"
        )


@dataclass(frozen=True)
class Limits:
    """max_model_len: most tokens of a sequence that sees all of them; max_stream_len: of one that does not
    (None: as many as the kernels count), since distances stay within its retention. max_reach: most tokens
    that a retention may span. retention: of requests that bring none.
    """

    cache: KVCache
    max_model_len: int
    max_stream_len: int | None
    max_reach: int
    retention: Retention

    def retention_of(self, wanted: str | None) -> Retention:
        """A request's own, or the engine's. Raises RequestError saying what would do."""
        if wanted is None:
            return self.retention
        try:
            retention = Retention.parse(wanted)
            check_reach(retention, self.max_reach)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        return retention

    def longest(self, retention: Retention) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        return min(self._by_model(retention), self.cache.capacity(retention))

    def check(self, prompt_tokens: int, retention: Retention) -> None:
        """Raise RequestError where a prompt does not fit with one token of answer."""
        by_model = self._by_model(retention)
        if prompt_tokens + 1 > by_model:
            raise RequestError(
                f"prompt has {prompt_tokens} tokens; with one token of answer at most {by_model} fit "
                "(max_model_len): shorten the prompt"
            )
        capacity = self.cache.capacity(retention)
        if prompt_tokens + 1 > capacity:
            raise RequestError(
                f"prompt has {prompt_tokens} tokens; the KV pool holds {capacity}: "
                "shorten the prompt or raise kv_memory"
            )

    def limit(self, prompt_tokens: int, max_tokens: int | None, retention: Retention) -> int:
        """Tokens at which a sequence ends. Where only the model would end it, a stream ends its answer after
        as many tokens as the model was made for.
        """
        if max_tokens is None and retention.is_full:
            return self.longest(retention)
        return min(prompt_tokens + (max_tokens or self.max_model_len), self.longest(retention))

    def _by_model(self, retention: Retention) -> int:
        if retention.is_full:
            return self.max_model_len
        return min(self.max_stream_len or MAX_POSITIONS, MAX_POSITIONS)
