"""What an engine has done, in numbers: requests, tokens, times, hits. Each request counts once.

Only the engine's thread writes, without locks. Others read plain numbers at any moment: each is right, and
two of them may be of moments that lie a step apart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvstrata.cache.manager import KVCache
from kvstrata.engine.block_life import BlockLife
from kvstrata.engine.histogram import Histogram, Recent
from kvstrata.engine.request import Request
from kvstrata.engine.speculation.counts import DraftCounts

HIT_SECONDS = 300.0  # the window of `hit_ratio`
_REQUEST = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_FIRST_TOKEN = (*_FIRST, 80.0, 160.0, 640.0)
_BETWEEN = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_KEEP = 0.9  # weight of what was known of a decode step's time at each new one


class Telemetry:
    """Counts of one engine. clock: the engine's, in seconds.

    prompt_tokens: of requests whose prompt is in the pool. generation_tokens: sampled. queried, hits: prompt
    tokens looked for in the cache, and found, at each request's first admission. by_source: prompt tokens
    by where their K and V came from, with `computed`. recomputed: tokens that no tier brought, by reason.
    finished: requests by finish reason. prefill, decode: tokens computed, those of preempted requests
    again, those proposed in vain too, and seconds of steps. speculation: tokens proposed ahead, and
    accepted.
    """

    def __init__(self, cache: KVCache, clock: Callable[[], float] = time.perf_counter) -> None:
        self.blocks = BlockLife(cache)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.queried = 0
        self.hits = 0
        self.by_source: Counter[str] = Counter()
        self.recomputed: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.steps = 0
        self.speculation = DraftCounts()
        self.first_token_seconds = Histogram(_FIRST_TOKEN)
        self.inter_token_seconds = Histogram(_BETWEEN)
        self.request_seconds = Histogram(_REQUEST)
        self.queue_seconds = Histogram(_REQUEST)
        self._clock = clock
        self._recent_queried = Recent(HIT_SECONDS)
        self._recent_hits = Recent(HIT_SECONDS)
        self._decode_step: float | None = None

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens of the last minutes that were found; 0 where none was looked for."""
        now = self._clock()
        queried = self._recent_queried.total(now)
        return min(1.0, self._recent_hits.total(now) / queried) if queried else 0.0

    @property
    def eviction_rate(self) -> float:
        """Blocks a second that were evicted for space in the last minute."""
        rate = self.blocks.eviction_rate
        return rate.total(self.blocks.now()) / rate.window

    def step(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step is over. Where it had both phases, decode has the time that steps without prefill take."""
        self.steps += 1
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens
        if not prefill_tokens:
            self.decode_seconds += seconds
            known = seconds if self._decode_step is None else self._decode_step
            self._decode_step = _KEEP * known + (1 - _KEEP) * seconds
            return
        decode = 0.0
        if decode_tokens:
            share = seconds * decode_tokens / (prefill_tokens + decode_tokens)
            decode = share if self._decode_step is None else min(seconds, self._decode_step)
        self.decode_seconds += decode
        self.prefill_seconds += seconds - decode

    def token(self, request: Request, previous: float | None, now: float) -> None:
        """An answer has a new token. previous: when its last one came (None: this is the first)."""
        self.generation_tokens += 1
        if previous is not None:
            self.inter_token_seconds.observe(now - previous)
        elif request.first_token is None:
            self.first_token_seconds.observe(now - request.arrival)
            self._count_prompt(request, computed=True)

    def drafted(self, request: Request, length: int, accepted: int) -> None:
        """A run of tokens was proposed for a request, and so many of them were right."""
        self.speculation.add(length, accepted)
        request.speculation.add(length, accepted)

    def ended(self, request: Request, reason: str, now: float) -> None:
        """A request's last answer has ended, for this reason."""
        self.finished[reason] += 1
        self.request_seconds.observe(now - request.arrival)
        if request.first_scheduled is not None:
            self.queue_seconds.observe(request.first_scheduled - request.arrival)
            if request.first_token is None:
                self._count_prompt(request, computed=False)
        self.recomputed.update(request.recomputed)

    def _count_prompt(self, request: Request, *, computed: bool) -> None:
        """Count a prompt once. computed: all of it is in the pool, and not only what was found."""
        length, found = len(request.prompt_token_ids), request.cached_by_source.total()
        if request.takes_hits:
            now = self._clock()
            self.queried += length
            self.hits += found
            self._recent_queried.add(length, now)
            self._recent_hits.add(found, now)
        self.by_source.update(request.cached_by_source)
        if computed:
            self.prompt_tokens += length
            self.by_source["computed"] += length - found
