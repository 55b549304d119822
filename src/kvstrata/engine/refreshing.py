"""Early refresh of what expires: drawn once a request that finds it, done behind everybody's back.

What the request found is in the pool, so it is served longer there at once, and offered to the tiers again, a
few blocks a step. Where processes share a tier, a lease says which of them does that. Blocks that have left
the pool by then are computed again when there is nothing else to do.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvstrata.cache.keys import KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.engine.leading import outcome_of
from kvstrata.engine.request import Sequence
from kvstrata.engine.scratch import Scratch
from kvstrata.engine.telemetry import Telemetry
from kvstrata.engine.tiering import Tiering
from kvstrata.tiers.lease import Claim, Lease, new_owner
from kvstrata.tiers.refresh import EarlyRefresh
from kvstrata.tiers.tier import Address

_AT_ONCE = 64  # tokens computed again before it is looked whether somebody wants something
_MOST_WAITING = 64  # prefixes
_LEAST_LEASE, _MOST_LEASE = 1.0, 600.0  # seconds for which nobody else refreshes the same


@dataclass
class RefreshCounts:
    """Refreshes by kind. prolonged: in the pool, where there are no tiers. republished: from the pool to the
    tiers. recomputed: of those, some blocks of which had left the pool. avoided: another process did it.
    """

    prolonged: int = 0
    republished: int = 0
    recomputed: int = 0
    avoided: int = 0


@dataclass(frozen=True, eq=False)
class _Found:
    """A prefix that is refreshed. addresses: of its blocks in the pool."""

    chain: KeyChain
    num_blocks: int
    addresses: tuple[Address, ...]


class Refreshing:
    """Refreshes for one engine. tiering: what is below its pool, if anything. For the engine's thread."""

    def __init__(
        self,
        cache: KVCache,
        early: EarlyRefresh,
        scratch: Scratch,
        telemetry: Telemetry,
        tiering: Tiering | None,
    ) -> None:
        self.counts = RefreshCounts()
        self._cache = cache
        self._early = early
        self._scratch = scratch
        self._telemetry = telemetry
        self._tiering = tiering
        self._stack = None if tiering is None else tiering.stack
        self._owner = new_owner()
        self._claims: list[tuple[Future[list[Claim]], _Found]] = []
        self._gone: deque[_Found] = deque(maxlen=_MOST_WAITING)

    @property
    def pending(self) -> bool:
        """Whether prefixes wait to be computed again, or for a lease."""
        return bool(self._gone or self._claims)

    def found(self, sequence: Sequence) -> None:
        """What a sequence found is in its tables: draw, once a request, whether it is refreshed."""
        self._take_claims()
        request, opened = sequence.request, sequence.cache
        blocks = sequence.num_computed // self._cache.block_size
        if request.drawn or opened is None or not blocks or not self._early.enabled:
            return
        request.drawn = True
        life_below = math.inf if self._stack is None else self._stack.shortest_life * (1 - opened.spread)
        deadline = self._cache.lifetimes.earliest(sequence.chain, blocks, life_below)
        delta = blocks * self._cache.block_size * (self._seconds_per_token() or 0.0)
        if deadline < math.inf and self._early.due(deadline, delta):
            self._refresh(sequence, blocks, opened.ttl)

    def tend(self) -> bool:
        """Compute some tokens of what has left the pool; whether there is more. For when nobody waits."""
        self._take_claims()
        if not self._gone:
            return False
        found, size = self._gone[0], self._cache.block_size
        whole = found.num_blocks * size
        hit = self._cache.match(found.chain, whole)
        if hit < whole:
            end = min(hit + _AT_ONCE // size * size or size, whole)
            with self._scratch.compute(found.chain, hit, end) as computed:
                if computed is not None:
                    self._cache.commit(computed, end)
                    return True
        self._gone.popleft()
        return bool(self._gone)

    def _seconds_per_token(self) -> float | None:
        """Of prefill, as far as it is known."""
        if self._tiering is not None:
            return self._tiering.loads.prefill.seconds_per_token
        tokens = self._telemetry.prefill_tokens
        return self._telemetry.prefill_seconds / tokens if tokens else None

    def _refresh(self, sequence: Sequence, blocks: int, ttl: float | None) -> None:
        """Serve a prefix longer, by the terms of the request that found it."""
        now = self._cache.clock()
        deadline = math.inf if ttl is None else now + ttl
        prolonged = self._cache.lifetimes.prolong(sequence.chain, blocks, deadline)
        found = _Found(sequence.chain.copy(), blocks, tuple(Address(*each) for each in prolonged))
        if self._stack is None:
            self.counts.prolonged += 1
        elif self._stack.leases is None:
            self._republish(found, None)
        else:
            name = found.chain.keys[blocks - 1]
            lease = Lease(found.chain.segment(blocks - 1), b"refresh:" + name, self._owner)
            life = min(deadline - now, self._stack.shortest_life)
            seconds = min(max(life / 2, _LEAST_LEASE), _MOST_LEASE)
            self._claims.append((self._stack.leases.claim([lease], seconds, [()]), found))

    def _take_claims(self) -> None:
        """Who has the lease stores to all tiers, the others to those of their own."""
        under_way, self._claims = self._claims, []
        for future, found in under_way:
            if not future.done():
                self._claims.append((future, found))
                continue
            outcome = outcome_of(future)
            if outcome is None or outcome[0].won:
                self._republish(found, None)
            else:
                self.counts.avoided += 1
                assert self._stack is not None
                assert self._stack.leases is not None
                if self._stack.leases.tier:
                    self._renew(found, self._stack.leases.tier)

    def _republish(self, found: _Found, above: int | None) -> None:
        self.counts.republished += 1
        self._renew(found, above)

    def _renew(self, found: _Found, above: int | None) -> None:
        assert self._tiering is not None
        self._tiering.offload.renew(found.addresses, above, partial(self._lost, found))

    def _lost(self, found: _Found) -> None:
        if found not in self._gone:
            self._gone.append(found)
            self.counts.recomputed += 1
