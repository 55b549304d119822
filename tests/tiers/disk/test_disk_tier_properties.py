"""Whatever is asked of a disk tier: nothing wrong is served, every slot has one owner, the cap holds."""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import scaled
from stored import FINGERPRINT, Time, blocks, drops, folder_bytes, misses, options, with_deadline

from kvstrata.tiers.disk import DiskTier
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.tier import StoreContext

CONTEXT = StoreContext(FINGERPRINT, 16, (5000, 12288), (True, False))
OTHER = StoreContext(bytes(32), 16, (5000, 12288))
CAP = OVERHEAD_BYTES + sum(Geometry(FINGERPRINT, g, 16, CONTEXT.payload_bytes[g]).charge(5) for g in (0, 1))

OPERATIONS = st.tuples(
    st.sampled_from(
        ["store", "store", "short_lived", "load", "delete", "pin", "unpin", "wait", "reopen", "other"]
    ),
    st.integers(0, 4),  # chain
    st.integers(1, 5),  # blocks
    st.integers(0, 1),  # group
)


@settings(max_examples=scaled(300, 30), deadline=None)
@given(st.lists(OPERATIONS, min_size=1, max_size=30), st.sampled_from(["lru", "fifo", "ttl"]), st.booleans())
def test_any_order_of_operations(operations, policy: str, quota: bool):
    with tempfile.TemporaryDirectory() as folder:
        path, time = Path(folder), Time()

        def opened(context: StoreContext = CONTEXT) -> DiskTier:
            limit = 40960 if quota else None
            return DiskTier(
                options(path, CAP, policy=policy, quota=limit, sync="none"),
                context,
                clocks=time.clocks,
                threads=1,
            )

        tier = opened()
        for what, chain, count, group in operations:
            time.pass_by(0.01)
            records = blocks(count, chain=chain, salt=str(chain % 2), context=CONTEXT, group=group)
            addresses = [record.identity.address for record in records]
            if what == "store":
                assert set(drops(tier, records)) <= {None, "full", "quota"}
            elif what == "short_lived":
                drops(tier, with_deadline(records, time.monotonic + 5))
            elif what == "load":
                known = tier.lookup(addresses)
                assert [miss is None for miss in misses(tier, records)] == known
            elif what == "delete":
                tier.delete(addresses)
                assert tier.lookup(addresses) == [False] * count
            elif what == "pin":
                held = tier.pin(addresses, time.monotonic + 20)
                assert held == tier.lookup(addresses)
            elif what == "unpin":
                tier.unpin(addresses)
            elif what == "wait":
                time.pass_by(4)
            elif what == "reopen":
                there = tier.lookup(addresses)
                tier.close()
                tier = opened()
                assert tier.lookup(addresses) == there
            else:  # another model uses the folder for a while
                tier.close()
                tier = opened(OTHER)
                drops(tier, blocks(count, chain=chain, context=OTHER, group=group))
                tier.check_integrity()
                tier.close()
                tier = opened()
            tier.check_integrity()
            assert folder_bytes(path / "store") <= CAP
        tier.close()
        assert folder_bytes(path / "store") <= CAP


@pytest.mark.parametrize("threads", [1, 3])
def test_many_threads_at_once(tmp_path: Path, threads: int):
    tier = DiskTier(options(tmp_path, CAP), CONTEXT, threads=threads)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(scaled(400, 60)):
            records = blocks(
                draw.randint(1, 5), chain=draw.randint(0, 5), context=CONTEXT, group=draw.randint(0, 1)
            )
            action = draw.choice([drops, misses, misses])
            action(tier, records)
            if draw.random() < 0.2:
                tier.delete([record.identity.address for record in records[-2:]])
            if draw.random() < 0.1:
                addresses = [record.identity.address for record in records]
                tier.pin(addresses, float("inf"))
                tier.unpin(addresses)

    with ThreadPoolExecutor(6) as workers:
        for future in [workers.submit(work, seed) for seed in range(6)]:
            future.result()
    tier.check_integrity()
    assert folder_bytes(tmp_path / "store") <= CAP
    tier.close()
