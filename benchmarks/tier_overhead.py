"""What tiers cost a workload that never hits them.

Two engines in one process, one with a RAM and a disk tier and one without, take turns at prompts that are all
new, so that drift of the machine meets both alike. Compared are the sums of seconds; the tiers' background
work counts where it slows the engine down. Prints one JSON object.

Usage: python benchmarks/tier_overhead.py FOLDER [--rounds 12] [--tokens 1000] [--answer 32] [--model M]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from kvstrata import LLM, SamplingParams

IDS = range(100, 40_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--model")
    chosen = parser.parse_args()
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=chosen.answer, ignore_eos=True)
    tiers = ("ram://?size=1GiB", f"disk://{(chosen.folder / 'overhead').resolve()}?size=4GiB")
    seconds: dict[str, list[float]] = {"without": [], "with": []}

    def ask(llm: LLM) -> float:
        prompt = [rng.choice(IDS) for _ in range(chosen.tokens)]
        began = time.perf_counter()
        llm.generate([prompt], params)
        return time.perf_counter() - began

    with (
        LLM(chosen.model, kv_memory="512MiB", max_model_len=4096) as without,
        LLM(chosen.model, kv_memory="512MiB", max_model_len=4096, tiers=tiers) as over,
    ):
        engines = {"without": without, "with": over}
        for round_ in range(chosen.rounds + 1):
            for name in ("without", "with") if round_ % 2 else ("with", "without"):
                took = ask(engines[name])
                if round_:  # the first warms up
                    seconds[name].append(took)
        assert over.engine.tiering is not None
        stats = over.engine.tiering.stats()
    pairs = [b / a - 1 for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print(
        json.dumps(
            {
                "overhead": sum(seconds["with"]) / sum(seconds["without"]) - 1,
                "overhead_median": statistics.median(pairs),
                "seconds": {name: sum(values) for name, values in seconds.items()},
                "stored": {tier.name: tier.usage.stores for tier in stats.tiers},
                "loaded": {tier.name: tier.usage.loads for tier in stats.tiers},
            }
        )
    )


if __name__ == "__main__":
    main()
