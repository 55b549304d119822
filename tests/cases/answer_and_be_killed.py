"""Answer prompts over a disk tier until killed, and tell of each answer.

Usage: python answer_and_be_killed.py MODEL URL SEED

Lines on stdout, each flushed: `open`, then a JSON object for each answer: number of the prompt, token ids of
the answer, when it was given (seconds, monotonic), and how many blocks had been dropped by then.
"""

from __future__ import annotations

import json
import random
import sys
import time

from prompts import ANSWER, prompt_of

from kvstrata import LLM


def main() -> None:
    model, url, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    draw = random.Random(seed)
    with LLM(model, kv_memory="16MiB", max_model_len=256, tiers=[url], threads=1) as llm:
        print("open", flush=True)
        while True:
            number = draw.randrange(10_000)
            [result] = llm.generate([prompt_of(number)], ANSWER)
            assert llm.engine.tiering is not None
            [tier] = llm.engine.tiering.stats().tiers
            line = {
                "number": number,
                "token_ids": result.outputs[0].token_ids,
                "at": time.monotonic(),
                "dropped": sum(tier.queue_drops.values()),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
