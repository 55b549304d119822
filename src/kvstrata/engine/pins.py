"""Prompts whose blocks somebody wants kept: pinned in the tiers that have them, else in the pool.

A pin in the pool takes blocks from everybody, so they are at most half of each group's, and they are let go
where a request could not run otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstrata.cache.keys import KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.tiers.stack import TierStack
from kvstrata.tiers.tier import Address

_POOL_SHARE = 0.5


@dataclass
class _Pin:
    addresses: list[Address]
    deadline: float
    in_pool: list[tuple[int, list[int]]]


class Pins:
    """Pins by the last key of what they hold. clock: of the cache. Only the engine's thread uses it."""

    def __init__(self, cache: KVCache, stack: TierStack | None, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._stack = stack
        self._clock = clock
        self._pins: dict[bytes, _Pin] = {}

    def pin(self, chain: KeyChain, ttl: float | None) -> int:
        """Hold the full blocks of a chain for `ttl` seconds (None: until `unpin`); tokens held.

        A second pin of the same chain takes the place of the first.
        """
        self.unpin(chain)
        deadline = float("inf") if ttl is None else self._clock() + ttl
        keys = chain.keys[: self._cache.match(chain, len(chain)) // self._cache.block_size]
        groups = range(len(self._cache.groups))
        addresses = [Address(key, group) for key in chain.keys for group in groups]
        below = [False] * len(addresses)
        if self._stack is not None and addresses:
            below = self._stack.pin(addresses, deadline)
        have = [all(below[i : i + len(groups)]) for i in range(0, len(below), len(groups))]
        held = have.index(False) if False in have else len(have)
        in_pool = [] if held >= len(keys) else self._pin_in_pool(keys, chain.own_from)
        if in_pool:
            held = max(held, len(keys))
        if held:
            self._pins[chain.keys[-1]] = _Pin(addresses, deadline, in_pool)
        return held * self._cache.block_size

    def unpin(self, chain: KeyChain) -> bool:
        """Let go; False if the chain was not pinned."""
        pin = self._pins.pop(chain.keys[-1], None) if chain.keys else None
        if pin is None:
            return False
        self._release(pin)
        return True

    def expire(self) -> None:
        """Let go of pins whose time has come."""
        now = self._clock()
        for key in [key for key, pin in self._pins.items() if pin.deadline <= now]:
            self._release(self._pins.pop(key))

    def clear(self) -> None:
        """Let go of all."""
        for pin in self._pins.values():
            self._release(pin)
        self._pins.clear()

    def yield_pool(self) -> bool:
        """Let go of the pool's blocks, since a request needs them; False if there are none."""
        found = False
        for pin in self._pins.values():
            found = found or bool(pin.in_pool)
            self._let_go(pin)
        return found

    def _pin_in_pool(self, keys: list[bytes], own_from: int | None) -> list[tuple[int, list[int]]]:
        """Pin the last block, and so those before it, in full-attention groups, in others all there are.

        own_from: where the blocks begin that carry a retention, and do not bring those before them.
        """
        shared = len(keys) if own_from is None else min(own_from, len(keys))
        pinned: list[tuple[int, list[int]]] = []
        for group in self._cache.groups:
            wanted = keys if group.window is not None else [*keys[:shared][-1:], *keys[shared:]]
            for key in wanted:
                blocks = self._cache.pin(key, group.number)
                if blocks is not None:
                    pinned.append((group.number, blocks))
            if np.count_nonzero(group.pool.pins) > _POOL_SHARE * group.pool.num_blocks:
                for number, blocks in pinned:
                    self._cache.unpin(number, blocks)
                return []
        return pinned

    def _release(self, pin: _Pin) -> None:
        self._let_go(pin)
        if self._stack is not None:
            self._stack.unpin(pin.addresses)

    def _let_go(self, pin: _Pin) -> None:
        for group, blocks in pin.in_pool:
            self._cache.unpin(group, blocks)
        pin.in_pool = []
