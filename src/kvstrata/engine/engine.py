"""The engine: requests go in, steps run, deltas come out. One thread calls it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.cache.keys import Extras
from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import FULL, Retention
from kvstrata.config import LoadMode, RequestOptions, SamplingParams
from kvstrata.engine.delivery import Delivery
from kvstrata.engine.limits import Limits
from kvstrata.engine.outputs import Delta
from kvstrata.engine.pages import PoolPages
from kvstrata.engine.pins import Pins
from kvstrata.engine.refreshing import Refreshing
from kvstrata.engine.request import Request
from kvstrata.engine.request import Sequence as Answer
from kvstrata.engine.runner import Model, Runner
from kvstrata.engine.scheduler import Scheduler
from kvstrata.engine.scratch import Scratch
from kvstrata.engine.settle import Settler
from kvstrata.engine.speculation.speculator import Speculator
from kvstrata.engine.telemetry import Telemetry
from kvstrata.engine.text import AnswerText
from kvstrata.engine.tiering import Tiering
from kvstrata.engine.work import Work
from kvstrata.errors import RequestError
from kvstrata.models.tokenizer import Tokenizer
from kvstrata.tiers.refresh import EarlyRefresh, uniform
from kvstrata.tiers.stack import TierStack

_STARVED = 30.0  # seconds
_CLOSE_SECONDS = 30.0
_PIN_SECONDS = 5.0
_CLEAR_SECONDS = 10.0


@dataclass(frozen=True)
class StepReport:
    """What one step did: tokens computed in each phase, sequences running, seconds it took."""

    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    seconds: float


class Engine:
    """Serves many requests at once over one model and one cache.

    eos_ids: the model's end tokens. max_model_len, max_stream_len, max_reach, retention: see `Limits`.
    vocab_size: of the model, where the tokenizer may know more tokens. seed: makes the seeds given to
    requests that bring none repeat. on_step: called with a report after each step. tiers: places below the
    pool, by the cache's clock; load_mode, audit, refresh_beta, ttl_jitter: see `EngineConfig`. speculator:
    proposes tokens ahead of decodes.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        cache: KVCache,
        *,
        eos_ids: Sequence[int],
        max_model_len: int,
        max_num_seqs: int,
        token_budget: int,
        device: torch.device,
        vocab_size: int | None = None,
        max_stream_len: int | None = None,
        max_reach: int | None = None,
        retention: Retention = FULL,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepReport], None] | None = None,
        tiers: TierStack | None = None,
        load_mode: LoadMode = "auto",
        audit: float = 0.0,
        refresh_beta: float = 0.0,
        ttl_jitter: float = 0.0,
        speculator: Speculator | None = None,
    ) -> None:
        self.cache = cache
        self.limits = Limits(cache, max_model_len, max_stream_len, max_reach or max_model_len, retention)
        self.max_model_len = self.limits.longest(retention)
        self.on_step = on_step
        self.telemetry = Telemetry(cache, clock)
        self._runner = Runner(model, cache, device)
        scratch = Scratch(cache, self._runner, tokenizer)
        self.tiering = (
            None
            if tiers is None
            else Tiering(
                cache,
                tiers,
                mode=load_mode,
                share=audit,
                scratch=scratch,
                token_budget=token_budget,
                clock=cache.clock,
            )
        )
        draws = random.Random(seed).getrandbits(64)
        self.refreshing = Refreshing(
            cache,
            EarlyRefresh(refresh_beta, seed=draws, clock=cache.clock),
            scratch,
            self.telemetry,
            self.tiering,
        )
        self.pins = Pins(cache, tiers, cache.clock)
        self.pages = PoolPages(cache.pools)
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            clock=clock,
            loads=None if self.tiering is None else self.tiering.loads,
            yield_pins=self.pins.yield_pool,
            spread=lambda sequence: ttl_jitter * uniform(draws, sequence.request.number),
            on_found=self.refreshing.found,
            allot=None if speculator is None else speculator.allot,
        )
        self.speculator = speculator
        self._tokenizer = tokenizer
        self._vocab_size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
        self._max_num_seqs = max_num_seqs
        self._seeds = random.Random(seed)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._starving_since: float | None = None
        self._delivery = Delivery(tokenizer, self.scheduler, frozenset(eos_ids), self.telemetry, clock)
        self._settler = Settler(tokenizer, self.scheduler, self._delivery, clock)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to do or to deliver."""
        return bool(self._requests) or self._delivery.pending

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        arrival: float | None = None,
    ) -> None:
        """Queue a request. Raises RequestError where it can never be served as given.

        arrival: submission time by the engine's clock (None: now).
        """
        options = options or RequestOptions()
        extras = self.extras(options, params)
        self._check(request_id, prompt_token_ids, params)
        self.limits.check(len(prompt_token_ids), extras.retention)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            options=options,
            arrival=self._clock() if arrival is None else arrival,
            number=self._arrivals,
            limit=self.limits.limit(len(prompt_token_ids), params.max_tokens, extras.retention),
            stop_ids=self._delivery.stop_ids(params),
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
        )
        self._arrivals += 1
        chain = self.cache.chain(request.prompt_token_ids, extras)
        first = Answer(request, 0, chain, AnswerText(self._tokenizer, params))
        request.sequences.append(first)
        self._requests[request_id] = request
        self.scheduler.arrive(first)

    def extras(self, options: RequestOptions, params: SamplingParams | None = None) -> Extras:
        """What separates the blocks of such a request from others of the same tokens. Raises RequestError."""
        retention = self.limits.retention_of(None if params is None else params.retention)
        return Extras(salt=options.cache_salt, adapter=options.adapter, retention=retention)

    def _check(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        length = len(prompt_token_ids)
        if request_id in self._requests:
            raise RequestError(f"request_id is {request_id!r}, which is being served; choose another")
        if length == 0:
            raise RequestError("prompt is empty; give at least one token")
        self._check_ids("prompt", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.n > self._max_num_seqs:
            raise RequestError(
                f"n is {params.n}; at most {self._max_num_seqs} answers run at once: ask for fewer "
                "or raise max_num_seqs"
            )

    def _check_ids(self, field: str, tokens: Sequence[int]) -> None:
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"{field} has token id {wrong}; ids of this model are 0 to {self._vocab_size - 1}"
            )

    def abort(self, request_id: str) -> bool:
        """End a request where it stands; False if it is not being served.

        Its blocks come back at once, but for those that a tier is filling: these when it is done.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._delivery.end_request(request, "abort")
        self._depart()
        return True

    def reset_cache(self, *, tiers: bool = False) -> list[str]:
        """Forget every cached block; requests being served go on, but nobody finds their blocks.

        tiers: empty them too, of this model's blocks. Returns the names of those that did not answer in time.
        """
        self.pins.clear()
        self.cache.reset()
        self.telemetry.blocks.forget_prefixes()
        if self.speculator is not None:
            self.speculator.reset()
        if self.tiering is not None:
            self.tiering.offload.forget()
        return self.tiering.stack.clear(_CLEAR_SECONDS) if tiers and self.tiering is not None else []

    def step(self) -> list[Delta]:
        """Run one step and return what is new since the last. Returns at once where nothing is to be done."""
        begin = self._clock()
        self.pins.expire()
        works: Sequence[Work] = self._schedule()
        if works:
            try:
                works = self._run(works)
            except BaseException:
                # Ctrl-C, memory, a defect: nobody else's answer may be lost or stuck half-way for it.
                self.scheduler.take_back(works)
                raise
            finally:
                self._depart()
            self._report(works, begin)
        return self._delivery.take()

    def _run(self, works: Sequence[Work]) -> Sequence[Work]:
        """Compute scheduled works, with what is proposed for them, and settle them; as they were computed."""
        speculator = self.speculator
        if speculator is None:
            self._settler.settle(works, self._runner.run(works))
            return works
        works = speculator.propose(works)
        begin = self._clock()
        verdicts = self._settler.settle(works, self._runner.run(works))
        speculator.learn(works, verdicts, self._clock() - begin)
        for work, verdict in zip(works, verdicts, strict=True):
            if work.draft:
                self.telemetry.drafted(work.sequence.request, len(work.draft), verdict.accepted)
        return works

    def _schedule(self) -> list[Work]:
        """The work of the next step; where there is none because tiers are waited for, after a short wait."""
        works = self.scheduler.schedule()
        if works or self.tiering is None or not self.tiering.loads.pending:
            self._starving_since = None
            return works
        self.tiering.stack.wait(self.tiering.loads.wait_seconds)
        works = self.scheduler.schedule()
        if not works and self.tiering.loads.lost_blocks and self.scheduler.waiting:
            self._starve()
        return works

    def _starve(self) -> None:
        """A tier that does not answer holds memory that a request needs: it does not wait for ever."""
        now = time.monotonic()
        self._starving_since = self._starving_since or now
        if now - self._starving_since > _STARVED:
            first = next(self.scheduler.waiting.in_order()).request
            first.error = (
                "a tier that does not answer holds the KV pool's memory: give it more, or do without"
            )
            self._delivery.end_request(first, "error")
            self._depart()

    def compute(self, work: Work) -> Tensor:
        """Run one work beside the schedule, its blocks taken by the caller: logits `[rows, vocab_size]`."""
        return self._runner.run([work]).logits

    def tend(self) -> bool:
        """Do a piece of what can wait (audits, refreshes, memory for blocks to come), for when there are no
        requests; whether there is more.
        """
        more = self.tiering is not None and self.tiering.tend()
        more = self.refreshing.tend() or more
        return self.pages.step() or more

    @property
    def settling(self) -> bool:
        """Whether something is still under way with the tiers, so that `tend` is to be called again soon."""
        return self.refreshing.pending or (self.tiering is not None and self.tiering.settling)

    def drain(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Wait until what was published is in the tiers, at most so many seconds."""
        if self.tiering is not None:
            self.tiering.drain(timeout)

    def pin(
        self,
        token_ids: Sequence[int],
        extras: Extras,
        ttl: float | None = None,
        *,
        wait: float = _PIN_SECONDS,
    ) -> int:
        """Keep the cached full blocks of a prompt for `ttl` seconds (None: until `unpin`); tokens kept.

        wait: most seconds to wait for blocks that are on their way to the tiers.
        """
        self._check_ids("prompt", token_ids)
        self.drain(wait)  # what was just computed is on its way to the tiers, which may hold it
        return self.pins.pin(self.cache.chain(token_ids, extras), ttl)

    def unpin(self, token_ids: Sequence[int], extras: Extras) -> bool:
        """Undo `pin`; False if there was none."""
        self._check_ids("prompt", token_ids)
        return self.pins.unpin(self.cache.chain(token_ids, extras))

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Drain and close the tiers, at most so many seconds; no step after this."""
        if self.tiering is not None:
            self.tiering.close(timeout)

    def _depart(self) -> None:
        for request in self._delivery.take_finished():
            del self._requests[request.request_id]
            self.scheduler.waiting.depart(request.options.user)
        if self.speculator is not None:
            self.speculator.tidy()

    def _report(self, works: Sequence[Work], begin: float) -> None:
        prefill = sum(work.count for work in works if work.is_prefill)
        decode = sum(work.count + len(work.draft) for work in works) - prefill
        seconds = self._clock() - begin
        self.telemetry.step(prefill, decode, seconds)
        if self.tiering is not None:
            self.tiering.after_step(prefill, decode, seconds)
        if self.on_step is not None:
            self.on_step(StepReport(prefill, decode, len(works), len(self.scheduler.waiting), seconds))
