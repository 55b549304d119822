"""Prints what bookkeeping costs for a fully cached prompt of 32,768 tokens: best of several runs, in ms."""

from __future__ import annotations

import json
import random
import time

from kvstrata.cache.formats import format_named
from kvstrata.cache.keys import Extras
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.manager import KVCache

TOKENS, BLOCK, RUNS = 32_768, 16, 9
PHASES = ("keys", "match", "open", "grow", "commit", "release")


def run(cache: KVCache, prompt: list[int]) -> dict[str, float]:
    """One request over the prompt, all but its last block found in the cache."""
    times = [time.perf_counter()]
    chain = cache.chain(prompt, Extras())
    times.append(time.perf_counter())
    hit = cache.match(chain, TOKENS - 1)
    times.append(time.perf_counter())
    seq = cache.open(chain, hit, TOKENS)
    times.append(time.perf_counter())
    if seq is None or not cache.grow(seq, TOKENS):
        raise RuntimeError("the pool is too small for the prompt")
    times.append(time.perf_counter())
    cache.commit(seq, TOKENS)
    times.append(time.perf_counter())
    cache.release(seq)
    times.append(time.perf_counter())
    spent = {phase: 1e3 * (times[i + 1] - times[i]) for i, phase in enumerate(PHASES)}
    return spent | {"total": sum(spent.values())}


def main() -> None:
    layout = BlockLayout(LayerGroup((0,), 1, 16), format_named("bf16"), BLOCK)
    cache = KVCache([layout], [2 * TOKENS // BLOCK], fingerprint=b"m" * 32, device="cpu", max_chunk=TOKENS)
    prompt = random.Random(0).choices(range(49_152), k=TOKENS)
    run(cache, prompt)
    results = [run(cache, prompt) for _ in range(RUNS)]
    print(json.dumps({phase: round(min(result[phase] for result in results), 3) for phase in results[0]}))


if __name__ == "__main__":
    main()
