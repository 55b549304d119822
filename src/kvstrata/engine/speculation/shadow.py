"""A sequence as the draft model's own cache has it: the same tokens under other keys."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvstrata.cache.keys import Extras, KeyChain
from kvstrata.cache.manager import KVCache
from kvstrata.cache.table import CacheSequence
from kvstrata.engine.request import Sequence, Status


@dataclass(eq=False)
class Shadow:
    """chain: tokens of the sequence, as far as they are told here. cache: None while the pool has no room.

    base: tokens that were certain when it last proposed; drafted: how many tokens it proposed after them, all
    but the last of which it has computed. used: number of the step that used it last. refused: tokens that
    the sequence had when it was found not to be worth catching up with.
    """

    sequence: Sequence
    chain: KeyChain
    cache: CacheSequence | None = None
    base: int = 0
    drafted: int = 0
    used: int = 0
    refused: int | None = None

    @property
    def pending(self) -> int:
        """Tokens that are certain and not computed."""
        return self.sequence.num_tokens - (0 if self.cache is None else self.cache.num_computed)


@dataclass
class Shadows:
    """The shadows of running sequences in one cache. Only accepted tokens are ever committed there."""

    cache: KVCache
    _all: dict[Sequence, Shadow] = field(default_factory=dict)
    _step: int = 0

    def begin_step(self) -> None:
        """From here on, what is used belongs to another step."""
        self._step += 1

    def of(self, sequence: Sequence) -> Shadow:
        """The shadow of a sequence, told of all its tokens."""
        shadow = self._all.get(sequence)
        if shadow is None:
            options = sequence.request.options
            extras = Extras(options.cache_salt, options.adapter, sequence.chain.retention)
            shadow = self._all[sequence] = Shadow(sequence, self.cache.chain((), extras))
        self._tell(shadow)
        return shadow

    def grow(self, shadow: Shadow, num_tokens: int) -> bool:
        """Give a shadow blocks for so many tokens, at the cost of those that this step has not used."""
        shadow.used = self._step
        while not self._try_grow(shadow, num_tokens):
            idle = [s for s in self._all.values() if s.cache is not None and s.used < self._step]
            if not idle:
                return False
            self._release(min(idle, key=lambda s: (s.used, s.sequence.rank)))
        return True

    def pending(self, shadow: Shadow, most: int) -> tuple[int, array[int]]:
        """Position and ids of the first tokens to be computed."""
        assert shadow.cache is not None
        start = shadow.cache.num_computed
        return start, shadow.chain.tokens[start : min(start + most, len(shadow.chain))]

    def missing(self, shadow: Shadow) -> int:
        """Tokens that neither the shadow nor the prefix cache has."""
        if shadow.cache is not None:
            return shadow.pending
        return shadow.pending - self.cache.match(shadow.chain, len(shadow.chain) - 1)

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """Of the tokens that were proposed last so many were right: keep what they computed, and no more."""
        shadow = self._all.get(sequence)
        if shadow is None or shadow.cache is None or not shadow.drafted:
            return
        self._tell(shadow)
        right = min(accepted, shadow.drafted - 1)
        self.cache.commit(shadow.cache, shadow.base + right)
        self.cache.truncate(shadow.cache, shadow.base + right)
        shadow.drafted = 0

    def tidy(self) -> None:
        """Release the shadows of sequences that do not run."""
        for sequence in [s for s in self._all if s.status is not Status.RUNNING]:
            self._release(self._all.pop(sequence))

    def _tell(self, shadow: Shadow) -> None:
        known = len(shadow.chain)
        if known < shadow.sequence.num_tokens:
            shadow.chain.extend(shadow.sequence.chain.tokens[known:])

    def _try_grow(self, shadow: Shadow, num_tokens: int) -> bool:
        if shadow.cache is None:
            hit = self.cache.match(shadow.chain, len(shadow.chain) - 1)
            prompt = len(shadow.sequence.request.prompt_token_ids)
            shadow.cache = self.cache.open(shadow.chain, hit, num_tokens, prompt_tokens=prompt)
        return shadow.cache is not None and self.cache.grow(shadow.cache, num_tokens)

    def _release(self, shadow: Shadow) -> None:
        if shadow.cache is not None:
            self.cache.release(shadow.cache)
            shadow.cache, shadow.drafted = None, 0
