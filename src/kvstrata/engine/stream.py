"""A text without end, predicted piece by piece under a retention, in the memory that the retention needs.

It runs over an engine's own cache and runner, as a request's prompt does, but hands out each piece's figures
at once instead of keeping them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor

from kvstrata.cache.table import CacheSequence
from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.engine.llm import LLM
from kvstrata.engine.request import Request, Status
from kvstrata.engine.request import Sequence as Answer
from kvstrata.engine.scheduler import LOGITS_CHUNK
from kvstrata.engine.text import AnswerText
from kvstrata.engine.work import Work
from kvstrata.errors import RequestError


class TextStream:
    """Token ids fed in order; only what the retention keeps of them is in the pool.

    token_ids: the whole text: its keys are made at once. retention: None is the engine's. Nothing of it is
    found by others, and it finds nothing. Close it, or use it in a `with`. Raises RequestError where it does
    not fit.
    """

    def __init__(self, llm: LLM, token_ids: Sequence[int], retention: str | None = None) -> None:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=1, retention=retention)
        extras = engine.extras(RequestOptions(), params)
        engine.limits.check(len(token_ids), extras.retention)
        self._engine = engine
        chain = engine.cache.chain(token_ids, extras)
        opened = engine.cache.open(chain, 0, len(token_ids))
        if opened is None:
            raise RequestError("the stream does not fit beside what is being served; wait for that to end")
        opened.tip = None  # publishes nothing
        self._cache: CacheSequence = opened
        self._silent = _answer(llm, opened, params)
        self._scored = _answer(llm, opened, replace(params, prompt_logprobs=0))
        self._last: Tensor | None = None

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
        parts: list[Tensor] = []
        end = self._end(count)
        while self.position < end:
            before, start = self._last, self.position
            logits = self._advance(self._scored, end)
            wanted = torch.tensor(self._cache.chain.tokens[start : self.position].tolist())
            parts.append(torch.full((1,), torch.nan) if before is None else _losses(before, wanted[:1]))
            parts.append(_losses(logits[:-1], wanted[1:]))
            del logits  # before the next ones: two of the largest tensor there is would be alive at a time
        return torch.cat(parts) if parts else torch.empty(0)

    def skip(self, count: int) -> None:
        """Compute the next `count` tokens without telling how well they were predicted, which is quicker."""
        end = self._end(count)
        while self.position < end:
            self._advance(self._silent, end)

    def _end(self, count: int) -> int:
        return min(self.position + count, len(self._cache.chain))

    def _advance(self, answer: Answer, end: int) -> Tensor:
        """Compute a chunk of tokens, at most up to `end`; its logits."""
        engine, start = self._engine, self.position
        size = min(end - start, LOGITS_CHUNK)
        if not engine.cache.grow(self._cache, start + size):
            raise RequestError("the KV pool has no room for the stream's next tokens; raise kv_memory")
        logits = engine.compute(Work(answer, start, size))
        engine.cache.commit(self._cache, start + size)
        self._last = logits[-1:].clone()
        return logits

    def close(self) -> None:
        """Give back the blocks; harmless the second time."""
        self._engine.cache.release(self._cache)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _answer(llm: LLM, opened: CacheSequence, params: SamplingParams) -> Answer:
    """What the runner takes tokens and tables from; of a prompt only the chain's tokens count here."""
    request = Request(
        request_id="stream",
        prompt=None,
        prompt_token_ids=[],
        params=params,
        options=RequestOptions(),
        arrival=0.0,
        number=0,
        limit=len(opened.chain),
        stop_ids=frozenset(),
        seed=0,
    )
    answer = Answer(request, 0, opened.chain, AnswerText(llm.tokenizer, params))
    answer.status, answer.cache = Status.RUNNING, opened
    request.sequences.append(answer)
    return answer


def _losses(logits: Tensor, wanted: Tensor) -> Tensor:
    """Negative log-probabilities of tokens, without a copy of the logits, the largest tensor there is."""
    losses: Tensor = torch.ops.kvstrata.logsumexp(logits) - logits.gather(1, wanted[:, None])[:, 0]
    return losses
