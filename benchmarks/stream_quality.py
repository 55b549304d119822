"""A long text through one stream under a retention: does it stay as good, and as small, as it began?

Feeds the text (repeated from its beginning where it is shorter) to one stream and measures three things.
The perplexity of the last tenth, against a fresh stream with the same retention that starts 4,096 tokens
before it. At some places spread over the stream, the perplexity of the next few tokens, against each
predicted from what the retention shows of the text then, computed afresh. And the process's resident memory,
from when the first tenth has been read. Prints one JSON object.

Usage: python benchmarks/stream_quality.py TEXT [--tokens 300000] [--retention sinks:4+1020] [--kv-dtype bf16]
                                          [--places 20] [--per-place 8] [--model M] --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstrata import LLM
from kvstrata.cache.retention import Retention
from kvstrata.engine.stream import TextStream

LEAD = 4096  # tokens that the fresh stream reads before those that count
PIECE = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--retention", default="sinks:4+1020")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--places", type=int, default=20)
    parser.add_argument("--per-place", type=int, default=8)
    parser.add_argument("--model")
    parser.add_argument("--json", action="store_true", help="One object on one line.")
    chosen = parser.parse_args()
    llm = LLM(chosen.model, kv_memory="96MiB", kv_dtype=chosen.kv_dtype, retention=chosen.retention)
    ids = llm.tokenizer.encode(chosen.text.read_text(encoding="utf-8"))
    ids = (ids * -(-chosen.tokens // len(ids)))[: chosen.tokens]
    figures = measure(llm, ids, Retention.parse(chosen.retention), chosen.places, chosen.per_place)
    figures |= {"retention": chosen.retention, "kv_dtype": chosen.kv_dtype, "model": llm.loaded.path.name}
    print(json.dumps(figures, indent=None if chosen.json else 2))


def measure(llm: LLM, ids: list[int], retention: Retention, places: int, per_place: int) -> dict[str, Any]:
    """Run the stream and what it is compared with."""
    began = time.perf_counter()
    losses, sizes, held = stream(llm, ids, "stream")
    seconds = time.perf_counter() - began
    tenth = len(ids) // 10
    last = len(ids) - tenth
    fresh, _, _ = stream(llm, ids[max(0, last - LEAD) :], "fresh stream")
    at = [tenth + (len(ids) - tenth - per_place) * i // max(1, places - 1) for i in range(places)]
    here = torch.cat([losses[p : p + per_place] for p in at])
    afresh = torch.cat([recomputed(llm, ids, retention, p, per_place) for p in progress(at, "places")])
    settled = sizes[max(1, len(sizes) // 10) :]
    return {
        "tokens": len(ids),
        "seconds": seconds,
        "tokens_per_second": len(ids) / seconds,
        "perplexity": perplexity(losses[1:]),
        "perplexity_first_tenth": perplexity(losses[1:tenth]),
        "perplexity_last_tenth": perplexity(losses[last:]),
        "perplexity_last_tenth_fresh": perplexity(fresh[-tenth:]),
        "last_tenth_ratio": perplexity(losses[last:]) / perplexity(fresh[-tenth:]),
        "places": places,
        "tokens_at_places": len(here),
        "perplexity_at_places": perplexity(here),
        "perplexity_at_places_afresh": perplexity(afresh),
        "places_ratio": perplexity(here) / perplexity(afresh),
        "resident_bytes": settled[-1],
        "resident_growth": settled[-1] / settled[0] - 1,
        "held_blocks": held[-1],
        "most_held_blocks": max(held),
    }


def stream(llm: LLM, ids: list[int], name: str) -> tuple[Tensor, list[int], list[int]]:
    """Losses of all tokens in nats, and after each piece the resident memory and the blocks held."""
    losses = torch.empty(len(ids))
    sizes, held = [], []
    with TextStream(llm, ids) as running:
        for start in progress(range(0, len(ids), PIECE), name):
            part = running.feed(PIECE)
            losses[start : start + len(part)] = part
            sizes.append(resident())
            held.append(running.held_blocks)
    llm.engine.cache.check_integrity()
    return losses, sizes, held


def recomputed(llm: LLM, ids: list[int], retention: Retention, place: int, count: int) -> Tensor:
    """Losses of `count` tokens from a place on, each from a fresh pass over what it sees."""
    losses = []
    for position in range(place, place + count):
        begin = position if retention.window is None else max(0, position - retention.window)
        first = range(min(retention.sinks, begin))
        visible = [*(ids[i] for i in first), *ids[begin : position + 1]]
        with TextStream(llm, visible, "full") as fresh:
            fresh.skip(len(visible) - 1)
            losses.append(fresh.feed(1))
    return torch.cat(losses)


def perplexity(losses: Tensor) -> float:
    return math.exp(losses.double().mean().item())


def resident() -> int:
    """Bytes of this process in main memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def progress(steps: Any, name: str) -> Any:
    """The steps, told of on stderr every few seconds."""
    told, began = 0.0, time.perf_counter()
    for number, step in enumerate(steps):
        now = time.perf_counter() - began
        if now - told > 5:
            told = now
            print(f"{name}: {number} of {len(steps)}, {now:.0f} s", file=sys.stderr, flush=True)
        yield step


if __name__ == "__main__":
    main()
