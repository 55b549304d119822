"""What an engine has below its pool: offload, loads, pins and the audit, under one roof."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.cache.keys import Extras
from kvstrata.cache.manager import KVCache
from kvstrata.config import LoadMode
from kvstrata.engine.audit import Audit, AuditCounts
from kvstrata.engine.election import LeaseCounts
from kvstrata.engine.loads import LoadCounts, Loads
from kvstrata.engine.offload import Offload
from kvstrata.engine.scratch import Scratch
from kvstrata.tiers.stack import TierStack, TierStats

_PROBE_TOKENS = 64  # computed at start to know about how long prefill takes
_PROBE_SECONDS = 1.0  # that a start waits for slow tiers
_PROBE_EXTRAS = Extras(salt="probe")


@dataclass(frozen=True)
class TieringStats:
    """Everything below the pool at one moment. dirty: blocks that no tier has taken yet. leases: None where
    no tier keeps any.
    """

    tiers: tuple[TierStats, ...]
    loads: LoadCounts
    audit: AuditCounts
    dirty: int
    seconds_per_prefill_token: float | None
    leases: LeaseCounts | None


class Tiering:
    """Binds a stack of tiers to a cache. share: of loaded blocks to audit. clock: of the cache."""

    def __init__(
        self,
        cache: KVCache,
        stack: TierStack,
        *,
        mode: LoadMode,
        share: float,
        scratch: Scratch,
        token_budget: int,
        clock: Callable[[], float],
    ) -> None:
        self.stack = stack
        self.offload = Offload(cache, stack)
        self.loads = Loads(cache, stack, self.offload, mode=mode, token_budget=token_budget, clock=clock)
        self.audit = Audit(cache, stack, scratch, share)
        if share > 0:
            self.loads.on_loaded = self.audit.loaded
        self._cache = cache
        self._scratch = scratch
        self._closed = False

    def calibrate(self) -> None:
        """Compute some tokens to know how long prefill takes (the second time counts); have tiers read."""
        self.stack.probe(_PROBE_SECONDS)
        tokens = min(_PROBE_TOKENS, self._cache.capacity_tokens)
        chain = self._cache.chain([0] * tokens, _PROBE_EXTRAS)
        for _ in range(2):
            begin = time.perf_counter()
            with self._scratch.compute(chain, 0, tokens) as computed:
                if computed is not None:
                    self.loads.prefill.add(tokens, 0, time.perf_counter() - begin)

    def after_step(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step is over: what it published goes on its way."""
        self.loads.prefill.add(prefill_tokens, decode_tokens, seconds)
        if self.loads.election is not None:
            self.loads.election.pace.stepped(prefill_tokens, seconds)
        self.offload.flush()

    def tend(self) -> bool:
        """Do a piece of what can wait, for when nothing else is to be done; whether there is more of it."""
        self.loads.settle(self.stack.collect())
        self.loads.reclaim()
        renewing = self.offload.renewing
        self.offload.flush()
        if self.audit.pending:
            self.audit.check_one()
        return self.audit.pending or 0 < self.offload.renewing < renewing

    @property
    def settling(self) -> bool:
        """Whether blocks are on their way to the tiers, wait for room there, or are a slow tier's to fill."""
        waiting = self.offload.dirty > 0 or self.offload.renewing > 0
        return self.stack.storing or waiting or self.loads.lost_blocks

    def drain(self, timeout: float) -> None:
        """Wait until what was published is in the tiers, dirty blocks too, at most so many seconds."""
        end = time.monotonic() + timeout
        self.loads.settle(self.stack.drain(timeout))
        while (left := self.offload.dirty + self.offload.renewing) and time.monotonic() < end:
            self.offload.flush()
            if not self.stack.storing and self.offload.dirty + self.offload.renewing == left:
                break  # nobody takes any now, nor has any left the pool
            self.loads.settle(self.stack.drain(max(0.0, end - time.monotonic())))

    def stats(self) -> TieringStats:
        """Figures at this moment."""
        return TieringStats(
            tiers=tuple(self.stack.stats()),
            loads=self.loads.counts,
            audit=self.audit.counts,
            dirty=self.offload.dirty,
            seconds_per_prefill_token=self.loads.prefill.seconds_per_token,
            leases=None if self.loads.election is None else self.loads.election.counts,
        )

    def close(self, timeout: float) -> None:
        """Finish the audit, offer what is dirty, and drain and close the tiers, at most so many seconds."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + timeout
        while self.tend() and time.monotonic() < end - timeout / 2:
            pass
        self.drain(max(0.0, end - timeout / 4 - time.monotonic()))
        self.stack.close(max(0.1, end - time.monotonic()))
