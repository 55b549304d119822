"""Store blocks until killed, and tell what was acknowledged.

Usage: python store_and_be_killed.py FOLDER SIZE SEED FORGETFUL

Lines on stdout, each flushed: `open`, then `CHAIN DROPPED...` when the store of a chain was acknowledged.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

from faulty_files import ForgetfulFiles
from stored import CONTEXT, blocks, misses, options

from kvstrata.tiers.disk import DiskTier


def main() -> None:
    folder, size, seed, forgetful = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    draw = random.Random(seed)
    files = ForgetfulFiles(lambda: draw.random() < 0.3) if forgetful else None
    tier = DiskTier(options(folder, size), CONTEXT, files=files)
    say, lock = sys.stdout.write, threading.Lock()
    print("open", flush=True)

    def work(worker: int) -> None:
        mine = random.Random(seed * 10 + worker)
        for round_ in range(1 << 30):
            chain = seed * 10_000 + worker * 5_000 + round_ % 5_000
            records = blocks(mine.randint(1, 6), chain=chain)
            outcomes = [stored.dropped or "-" for stored in tier.store(records).result()]
            with lock:
                say(f"{chain} {' '.join(outcomes)}\n")
                sys.stdout.flush()
            if mine.random() < 0.2:
                misses(tier, records)
            if mine.random() < 0.05:
                tier.delete([records[-1].identity.address])

    for worker in range(2):
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    time.sleep(60)


if __name__ == "__main__":
    main()
