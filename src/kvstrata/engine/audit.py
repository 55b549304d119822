"""Trust, but check: a share of the blocks that came from tiers is computed again and compared bit for bit."""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass

from kvstrata.cache.keys import KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.engine.request import Sequence
from kvstrata.engine.scratch import Scratch
from kvstrata.tiers.stack import TierStack
from kvstrata.tiers.tier import Address

_log = logging.getLogger(__name__)
_MOST_WAITING = 256  # blocks; what comes on top of them is not audited


@dataclass
class AuditCounts:
    """checked: blocks compared. mismatches: of those, wrong ones. skipped: gone, or more than can wait."""

    checked: int = 0
    mismatches: int = 0
    skipped: int = 0


class Audit:
    """Draws blocks as they are loaded and checks one at a time when the engine has nothing else to do.

    share: of loaded blocks. A wrong one is logged and taken out of pool and tiers, with all after it that is
    known. Only the engine's thread uses it.
    """

    def __init__(self, cache: KVCache, stack: TierStack, scratch: Scratch, share: float) -> None:
        self.counts = AuditCounts()
        self._cache = cache
        self._stack = stack
        self._scratch = scratch
        self.share = share
        self._draws = random.Random(0)
        self._waiting: deque[tuple[KeyChain, int]] = deque()

    @property
    def pending(self) -> bool:
        """Whether blocks wait to be checked."""
        return bool(self._waiting)

    def loaded(self, sequence: Sequence, first: int, end: int) -> None:
        """Blocks of a sequence were loaded: some are noted to be checked."""
        for position in range(first, end):
            if self._draws.random() < self.share:
                if len(self._waiting) < _MOST_WAITING:
                    self._waiting.append((sequence.chain, position))
                else:
                    self.counts.skipped += 1

    def check_one(self) -> None:
        """Compute the block that waits longest again, and compare it with the pool's, in all groups."""
        chain, position = self._waiting.popleft()
        size = self._cache.block_size
        with self._scratch.compute(chain, position * size, (position + 1) * size) as computed:
            if computed is None:
                self.counts.skipped += 1
                return
            wrong, compared = [], 0
            for group, pool in enumerate(self._cache.pools):
                block = self._cache.block_of(chain.keys[position], group)
                if block is not None:
                    compared += 1
                    own = pool.payload(computed.tables[group][position])
                    if not own.equal(pool.payload(block)):
                        wrong.append(group)
        self.counts.checked += compared > 0
        self.counts.skipped += compared == 0
        if wrong:
            self._condemn(chain, position, wrong)

    def _condemn(self, chain: KeyChain, position: int, groups: list[int]) -> None:
        self.counts.mismatches += 1
        _log.error(
            "audit: block %s (position %d, groups %s) is not what computing it again gives; "
            "it and what follows it is removed from the pool and the tiers",
            chain.keys[position].hex(),
            position,
            groups,
        )
        everywhere = range(len(self._cache.pools))
        condemned = [(block, group) for block in range(position, len(chain.keys)) for group in everywhere]
        self._stack.delete(
            [Address(chain.keys[block], group) for block, group in condemned],
            [chain.segment(block) for block, _ in condemned],
        )
        self._cache.forget(chain.keys[position])
