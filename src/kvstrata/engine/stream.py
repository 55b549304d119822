"""A text without end, predicted piece by piece under a retention, in the memory that the retention needs.

It runs over an engine's own cache and runner, as a request's prompt does, but hands out each piece's figures
at once instead of keeping them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from kvstrata.cache.table import CacheSequence
from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.engine.llm import LLM
from kvstrata.engine.request import Request, Status
from kvstrata.engine.request import Sequence as Answer
from kvstrata.engine.scheduler import LOGITS_CHUNK, Work
from kvstrata.engine.text import AnswerText
from kvstrata.errors import RequestError


class TextStream:
    """Token ids fed in order; only what the retention keeps of them is in the pool.

    token_ids: the whole text: its keys are made at once. retention: None is the engine's. Nothing of it is
    found by others, and it finds nothing. Close it, or use it in a `with`. Raises RequestError where it does
    not fit.
    """

    def __init__(self, llm: LLM, token_ids: Sequence[int], retention: str | None = None) -> None:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, retention=retention)
        options = RequestOptions(cache_salt="stream")
        extras = engine.extras(options, params)
        engine.limits.check(len(token_ids), extras.retention)
        self._engine = engine
        chain = engine.cache.chain(token_ids, extras)
        opened = engine.cache.open(chain, 0, len(token_ids))
        if opened is None:
            raise RequestError("the stream does not fit beside what is being served; wait for that to end")
        opened.tip = None  # publishes nothing
        self._cache: CacheSequence = opened
        # Only the length of a prompt counts here; the tokens are the chain's.
        request = Request(
            request_id="stream",
            prompt=None,
            prompt_token_ids=[],
            params=params,
            options=options,
            arrival=0.0,
            number=0,
            limit=len(token_ids),
            stop_ids=frozenset(),
            seed=0,
        )
        self._answer = Answer(request, 0, chain, AnswerText(llm.tokenizer, params))
        self._answer.status, self._answer.cache = Status.RUNNING, opened
        self._last: Tensor | None = None
        request.sequences.append(self._answer)

    @property
    def position(self) -> int:
        """Tokens fed so far."""
        return self._cache.num_computed

    @property
    def held_blocks(self) -> int:
        """Blocks that the stream holds in all layer groups."""
        return sum(len(self._cache.blocks(group)) for group in range(len(self._cache.tables)))

    def feed(self, count: int) -> Tensor:
        """Compute the next `count` tokens; each one's negative log-probability in nats, float32 `[count]`.

        The text's first token is predicted by nothing: its value is NaN.
        """
        chain, engine = self._cache.chain, self._engine
        end = min(self.position + count, len(chain))
        parts: list[Tensor] = []
        while self.position < end:
            start = self.position
            size = min(end - start, LOGITS_CHUNK)
            if not engine.cache.grow(self._cache, start + size):
                raise RequestError("the KV pool has no room for the stream's next tokens; raise kv_memory")
            logits = engine.compute(Work(self._answer, start, size))
            engine.cache.commit(self._cache, start + size)
            before = torch.full_like(logits[:1], torch.nan) if self._last is None else self._last
            rows = torch.cat((before, logits[:-1]))
            self._last = logits[-1:].clone()
            wanted = torch.tensor(chain.tokens[start : start + size].tolist())
            parts.append(torch.nn.functional.cross_entropy(rows, wanted, reduction="none"))
        return torch.cat(parts) if parts else torch.empty(0)

    def close(self) -> None:
        """Give back the blocks; harmless the second time."""
        self._engine.cache.release(self._cache)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
