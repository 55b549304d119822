"""Drives a cache as an engine would, with a fake model whose K and V tell which tokens they come from."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from kvstrata.cache.keys import Extras
from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import FULL, Retention
from kvstrata.cache.table import CacheSequence


def mark(salt: str, tokens: list[int], position: int, retention: Retention = FULL) -> float:
    """What the fake model writes at a position: all tokens up to there count, and the retention from where it
    hides some; fp32 holds it exactly.
    """
    hides = retention.unhidden is not None and position >= retention.unhidden
    content = (salt, tokens[: position + 1], str(retention) if hides else "")
    return float(zlib.crc32(repr(content).encode()) >> 8)


@dataclass(eq=False)
class Run:
    """A sequence with the tokens it was really computed from."""

    seq: CacheSequence
    tokens: list[int]
    salt: str = ""

    def mark(self, position: int) -> float:
        return mark(self.salt, self.tokens, position, self.seq.chain.retention)


def start(
    cache: KVCache,
    tokens: list[int],
    *,
    salt: str = "",
    reserve: int | None = None,
    retention: Retention = FULL,
    **meta: object,
) -> Run | None:
    chain = cache.chain(tokens, Extras(salt=salt, retention=retention))
    hit = cache.match(chain, len(tokens) - 1)
    seq = cache.open(chain, hit, len(tokens) if reserve is None else reserve, **meta)  # type: ignore[arg-type]
    return None if seq is None else Run(seq, list(tokens), salt)


def compute(cache: KVCache, run: Run, num_tokens: int) -> bool:
    """One step: grow, write what the model would, commit."""
    if not cache.grow(run.seq, num_tokens):
        return False
    write(cache, run, num_tokens)
    return True


def write(cache: KVCache, run: Run, num_tokens: int) -> None:
    """The part of a step after its growth."""
    for pool, table in zip(cache.pools, run.seq.tables, strict=True):
        for position in range(run.seq.num_computed, num_tokens):
            block, slot = divmod(position, cache.block_size)
            pool.kv[table[block], :, :, :, slot] = run.mark(position)
    cache.commit(run.seq, num_tokens)


def append(run: Run, token: int) -> None:
    run.tokens.append(token)
    run.seq.chain.extend([token])


def finish(cache: KVCache, tokens: list[int], **settings: object) -> Run | None:
    """Compute a whole prompt in one step and release it."""
    run = start(cache, tokens, **settings)  # type: ignore[arg-type]
    if run is not None:
        assert compute(cache, run, len(tokens))
        cache.release(run.seq)
    cache.check_integrity()
    return run


def hit(cache: KVCache, tokens: list[int], salt: str = "", retention: Retention = FULL) -> int:
    return cache.match(cache.chain(tokens, Extras(salt=salt, retention=retention)), len(tokens))


def assert_true_content(cache: KVCache, run: Run) -> None:
    """Every token that the next one sees is in the tables, as the sequence's own tokens give it."""
    size, computed = cache.block_size, run.seq.num_computed
    for pool, table, seen in zip(cache.pools, run.seq.tables, run.seq.seen, strict=True):
        visible = set(range(-(-computed // size))) - set(seen.hidden_blocks(computed, size))
        assert {at for at, block in enumerate(table[: -(-computed // size)]) if block >= 0} == visible
        for position in range(computed):
            block, slot = divmod(position, size)
            if block in visible:
                stored = pool.kv[table[block], :, :, :, slot]
                assert (stored == run.mark(position)).all(), f"position {position} holds other content"
