"""Forward passes that leave nothing behind: to measure prefill, and to compute a block again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.cache.keys import KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.cache.table import CacheSequence
from kvstrata.config import RequestOptions, SamplingParams
from kvstrata.engine.request import Request, Sequence, Status
from kvstrata.engine.runner import Runner
from kvstrata.engine.text import AnswerText
from kvstrata.engine.work import Work
from kvstrata.models.tokenizer import Tokenizer


class Scratch:
    """Computes tokens in blocks that are never published."""

    def __init__(self, cache: KVCache, runner: Runner, tokenizer: Tokenizer) -> None:
        self._cache = cache
        self._runner = runner
        self._tokenizer = tokenizer

    @contextmanager
    def compute(self, chain: KeyChain, start: int, end: int) -> Iterator[CacheSequence | None]:
        """Compute tokens `start` to `end` of a chain over what the pool has of those before.

        Yields the sequence with their K and V in its tables, None where the pool has not the blocks before or
        no room. start: a multiple of block_size.
        """
        opened = self._cache.open(chain, start, end) if self._cache.match(chain, start) == start else None
        if opened is None:
            yield None
            return
        try:
            if not self._cache.grow(opened, end):
                yield None
                return
            self._runner.run([Work(self._sequence(chain, opened, end), start, end - start)])
            yield opened
        finally:
            self._cache.release(opened)

    def _sequence(self, chain: KeyChain, opened: CacheSequence, end: int) -> Sequence:
        params = SamplingParams(max_tokens=1)
        request = Request(
            request_id="scratch",
            prompt=None,
            prompt_token_ids=chain.tokens[:end].tolist(),
            params=params,
            options=RequestOptions(),
            arrival=0.0,
            number=0,
            limit=end,
            stop_ids=frozenset(),
            seed=0,
        )
        sequence = Sequence(request, 0, chain, AnswerText(self._tokenizer, params))
        sequence.status, sequence.cache = Status.RUNNING, opened
        request.sequences.append(sequence)
        return sequence
