"""A working set four times the pool: what tiers keep of an unbounded pool's hits, and what that is worth.

Prompts of equal length are asked for once each, which counts for nothing, and then by a Zipf law, which is
measured: one token of answer each, one after another. Compared are a pool that holds a quarter, the same
over RAM and disk, the same over RAM for half of them, and hit ratios replayed: without limit, and of the RAM
tier's policy alone. Prints one JSON object; `--only` measures some of the settings.

Usage: python benchmarks/working_set.py FOLDER [--prompts 200] [--tokens 1000] [--requests 200] [--model M]
                                               [--only pool --only ram_and_disk]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvstrata import LLM, SamplingParams
from kvstrata.cache.keys import Extras
from kvstrata.cli.bench.replay import Arrival, most_hits, replay
from kvstrata.tiers.ram import DEFAULT_POLICY

IDS = range(100, 40_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--model")
    parser.add_argument("--only", action="append", choices=("pool", "ram_and_disk", "ram_for_half"))
    chosen = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.choice(IDS) for _ in range(chosen.tokens)] for _ in range(chosen.prompts)]
    weights = list(accumulate(1 / rank for rank in range(1, chosen.prompts + 1)))
    asked = rng.choices(range(chosen.prompts), cum_weights=weights, k=chosen.requests)
    block = _block_bytes(chosen.model)
    blocks = chosen.prompts * -(-(chosen.tokens + 1) // 16)
    quarter, half = blocks // 4 * block, blocks // 2 * block
    disk = f"disk://{(chosen.folder / 'working-set').resolve()}?size={2 * blocks * block}"
    runs = {
        "pool": (),
        "ram_and_disk": (f"ram://?size={quarter}", disk),
        "ram_for_half": (f"ram://?size={half}",),
    }
    figures: dict[str, Any] = {}
    arrivals: list[Arrival] = []
    for name, tiers in runs.items():
        if not chosen.only or name in chosen.only:
            print(name, file=sys.stderr)
            figures[name], arrivals = _run(chosen.model, prompts, asked, quarter, tiers)
    # The replays' hits are all in the measured part: before it, each prompt comes for the first time.
    share = _usable(chosen.tokens) * len(arrivals) / len(asked)
    at_best = figures["unbounded_hit_ratio"] = most_hits(arrivals) * share
    if "ram_and_disk" in figures:
        figures["hits_of_unbounded"] = figures["ram_and_disk"]["hit_ratio"] / at_best
    if "pool" in figures and "ram_and_disk" in figures:
        figures["throughput_vs_pool"] = figures["pool"]["seconds"] / figures["ram_and_disk"]["seconds"]
    if "ram_for_half" in figures:
        replayed = replay(arrivals, DEFAULT_POLICY, half // block).hit_ratio * share
        figures["replayed_half_hit_ratio"] = replayed
        figures["half_minus_replay"] = figures["ram_for_half"]["hit_ratio"] - replayed
    print(json.dumps(figures))


def _run(
    model: str | None, prompts: list[list[int]], asked: list[int], pool: int, tiers: tuple[str, ...]
) -> tuple[dict[str, Any], list[Arrival]]:
    """Hit ratio and seconds of one setting, and what arrived when."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    arrivals, cached = [], 0
    with LLM(model, kv_memory=pool, tiers=tiers, max_model_len=4096) as llm:
        began = start = time.monotonic()
        for count, number in enumerate([*range(len(prompts)), *asked]):
            if count == len(prompts):
                start, cached = time.monotonic(), 0
            chain = llm.engine.cache.chain(prompts[number], Extras())
            arrivals.append(Arrival(time.monotonic() - began, tuple(chain.keys)))
            cached += llm.generate([prompts[number]], params)[0].usage.cached_tokens
        seconds = time.monotonic() - start
        tokens = sum(len(prompts[number]) for number in asked)
        stats = llm.engine.tiering.stats() if llm.engine.tiering is not None else None
    result: dict[str, Any] = {"hit_ratio": cached / tokens, "seconds": seconds, "tok_s": tokens / seconds}
    if stats is not None:
        result["tiers"] = {
            tier.name: {"loaded": tier.usage.loads, "queue_drops": tier.queue_drops} for tier in stats.tiers
        }
    return result, arrivals


def _block_bytes(model: str | None) -> int:
    """Bytes that 16 tokens take in all layer groups."""
    with LLM(model, kv_memory="64MiB", max_model_len=256) as llm:
        return sum(pool.layout.stride_bytes for pool in llm.engine.cache.pools)


def _usable(tokens: int) -> float:
    """Share of a prompt that full blocks before its last token cover, of what a replay counts as all."""
    return (tokens - 1) // 16 * 16 / tokens


if __name__ == "__main__":
    main()
