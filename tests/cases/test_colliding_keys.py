"""Two prompts whose block keys collide: the tokens and the parent are compared, and a mismatch is a miss."""

from __future__ import annotations

import itertools

from kvstrata.cache.formats import format_named
from kvstrata.cache.keys import Extras
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache

BLOCK = 4


def make_cache() -> KVCache:
    layout = BlockLayout(LayerGroup((0,), 1, 2), format_named("fp32"), BLOCK)
    return KVCache([layout], [8], fingerprint=b"model", device="cpu", max_chunk=64, digest_bytes=1)


def compute(cache: KVCache, tokens: list[int], salt: str = "") -> int:
    """Compute and release a prompt; returns the tokens that were found."""
    chain = cache.chain(tokens, Extras(salt))
    hit = cache.match(chain, len(tokens))
    seq = cache.open(chain, hit, len(tokens))
    assert seq is not None
    assert cache.grow(seq, len(tokens))
    cache.commit(seq, len(tokens))
    cache.release(seq)
    cache.check_integrity()
    return hit


def colliding_with(cache: KVCache, tokens: list[int]) -> list[int]:
    wanted = cache.chain(tokens, Extras()).keys[0]
    candidates = ([token] * BLOCK for token in itertools.count(1000))
    return next(other for other in candidates if cache.chain(other, Extras()).keys[0] == wanted)


def test_prompt_with_a_colliding_key_is_a_miss() -> None:
    cache = make_cache()
    prompt = [1, 2, 3, 4]
    other = colliding_with(cache, prompt)
    assert compute(cache, prompt) == 0
    assert compute(cache, other) == 0, "the content of another prompt was served"
    assert compute(cache, prompt) == BLOCK, "the second prompt took the place of the first"
    assert cache.stats().collisions >= 1


def test_blocks_after_a_colliding_one_are_not_shared_either() -> None:
    cache = make_cache()
    prompt, tail = [1, 2, 3, 4], [5, 6, 7, 8]
    other = colliding_with(cache, prompt)
    # equal keys before equal tails give equal keys: only the content before them tells the tails apart
    assert cache.chain(prompt + tail, Extras()).keys == cache.chain(other + tail, Extras()).keys
    compute(cache, prompt + tail)
    assert compute(cache, other + tail) == 0
    cache.reset()
    compute(cache, other)
    assert compute(cache, prompt + tail) == 0
    assert compute(cache, other + tail) == BLOCK, (
        "the tail of the other prompt was found under the colliding key"
    )


def test_same_tokens_under_a_salt_with_a_colliding_key_are_not_shared() -> None:
    cache = make_cache()
    prompt = [1, 2, 3, 4]
    wanted = cache.chain(prompt, Extras()).keys
    salt = next(str(n) for n in itertools.count() if cache.chain(prompt, Extras(str(n))).keys == wanted)
    compute(cache, prompt)
    assert compute(cache, prompt, salt) == 0
