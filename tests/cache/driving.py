"""Drives a cache as an engine would, with a fake model whose K and V tell which tokens they came from."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from kvstrata.cache.keys import Extras
from kvstrata.cache.manager import KVCache
from kvstrata.cache.table import CacheSequence


def mark(salt: str, tokens: list[int], position: int) -> float:
    """What the fake model writes at a position: a function of all tokens up to there, exact in fp32."""
    return float(zlib.crc32(repr((salt, tokens[: position + 1])).encode()) >> 8)


@dataclass(eq=False)
class Run:
    """A sequence with the tokens it was really computed from."""

    seq: CacheSequence
    tokens: list[int]
    salt: str = ""


def start(
    cache: KVCache, tokens: list[int], *, salt: str = "", reserve: int | None = None, **meta: object
) -> Run | None:
    chain = cache.chain(tokens, Extras(salt=salt))
    hit = cache.match(chain, len(tokens) - 1)
    seq = cache.open(chain, hit, len(tokens) if reserve is None else reserve, **meta)  # type: ignore[arg-type]
    return None if seq is None else Run(seq, list(tokens), salt)


def compute(cache: KVCache, run: Run, num_tokens: int) -> bool:
    """One step: grow, write what the model would, commit."""
    if not cache.grow(run.seq, num_tokens):
        return False
    for pool, table in zip(cache.pools, run.seq.tables, strict=True):
        for position in range(run.seq.num_computed, num_tokens):
            block, slot = divmod(position, cache.block_size)
            pool.kv[table[block], :, :, :, slot] = mark(run.salt, run.tokens, position)
    cache.commit(run.seq, num_tokens)
    return True


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


def hit(cache: KVCache, tokens: list[int], salt: str = "") -> int:
    return cache.match(cache.chain(tokens, Extras(salt=salt)), len(tokens))


def assert_true_content(cache: KVCache, run: Run) -> None:
    """Every block in the tables holds what the sequence's own tokens give."""
    for pool, table, first in zip(cache.pools, run.seq.tables, run.seq.slipped, strict=True):
        for position in range(first * cache.block_size, run.seq.num_computed):
            block, slot = divmod(position, cache.block_size)
            stored = pool.kv[table[block], :, :, :, slot]
            assert (stored == mark(run.salt, run.tokens, position)).all(), (
                f"position {position} holds other content"
            )
