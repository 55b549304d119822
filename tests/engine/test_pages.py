"""Memory of pools is there before blocks are written to it, a bounded part of it, and only that."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy import make_toy

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.pool import BlockPool
from kvstrata.engine import pages
from kvstrata.engine.pages import PoolPages
from kvstrata.tiers import memory

AHEAD = 8 << 20
SPILL = 2  # blocks: a huge page may reach past what was asked for, and into a neighbour's memory
PAGEMAP = Path("/proc/self/pagemap")


def make_pool(num_blocks: int = 64) -> BlockPool:
    """Blocks of 1 MiB."""
    layout = BlockLayout(LayerGroup(tuple(range(16)), 8, 128), format_named("bf16"), 16)
    assert layout.stride_bytes == 1 << 20
    return BlockPool(layout, num_blocks, "cpu")


def present(pool: BlockPool, block: int) -> bool:
    """Whether all pages of a block's memory are there."""
    page = mmap.PAGESIZE
    payload = pool.payload(block)
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(payload.data_ptr() // page * 8)
        entries = torch.frombuffer(bytearray(file.read(payload.nbytes // page * 8)), dtype=torch.int64)
    return bool((entries < 0).all())  # the highest bit: present


def count(pool: BlockPool) -> int:
    return sum(present(pool, block) for block in range(pool.num_blocks))


def check_ready(pool: BlockPool, blocks: int) -> None:
    assert blocks <= count(pool) <= min(blocks + SPILL, pool.num_blocks)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PAGEMAP.exists():
        pytest.skip("the system does not tell which pages are there")
    if not make_pool(2).populate(range(2)):
        pytest.skip("the system does not populate memory")
    monkeypatch.setattr(pages, "_AHEAD_BYTES", AHEAD)
    monkeypatch.setattr(pages, "is_short", lambda: False)


def exhaust(step: Callable[[], bool]) -> int:
    """How many steps had something to do."""
    steps = 0
    while step():
        steps += 1
        assert steps < 1000
    return steps


def test_no_memory_is_taken_before_and_a_bounded_part_after_the_start() -> None:
    pool = make_pool()
    check_ready(pool, 0)
    PoolPages([pool]).prepare(threads=2, seconds=60)
    check_ready(pool, 8)
    assert present(pool, 0)


def test_each_step_is_a_portion_and_what_is_ready_moves_on_with_what_is_used() -> None:
    pool = make_pool()
    ready = PoolPages([pool])
    assert exhaust(ready.step) == 4
    held = [pool.allocate() for _ in range(5)]
    assert held == [0, 1, 2, 3, 4]
    assert exhaust(ready.step) == 3
    check_ready(pool, 14)
    assert not ready.step()


def test_blocks_that_come_back_take_no_more_memory() -> None:
    pool = make_pool()
    ready = PoolPages([pool])
    exhaust(ready.step)
    for _ in range(3):
        pool.release([pool.allocate()])
        exhaust(ready.step)
    assert count(pool) <= 10 + SPILL


def test_it_ends_with_the_pool() -> None:
    pool = make_pool(5)
    ready = PoolPages([pool])
    assert exhaust(ready.step) == 3
    check_ready(pool, 5)


def test_pools_share_what_is_kept_ready() -> None:
    pools = [make_pool(), make_pool()]
    exhaust(PoolPages(pools).step)
    for pool in pools:
        check_ready(pool, 4)


def test_content_is_not_changed() -> None:
    pool = make_pool()
    pattern = torch.arange(pool.payload(0).numel(), dtype=torch.int64).to(torch.uint8)
    pool.payload(1).copy_(pattern)
    exhaust(PoolPages([pool]).step)
    assert torch.equal(pool.payload(1), pattern)
    assert not pool.payload(3).any()


def test_the_start_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    pool = make_pool()
    PoolPages([pool]).prepare(threads=1, seconds=2.5)
    check_ready(pool, 4)


def test_nothing_is_taken_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    ready = PoolPages([pool])
    monkeypatch.setattr(pages, "is_short", memory.is_short)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 20)
    assert not ready.step()
    check_ready(pool, 0)
    monkeypatch.undo()
    assert ready.step() == (not memory.is_short())


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    asked: list[range] = []
    monkeypatch.setattr(BlockPool, "populate", lambda self, blocks: asked.append(blocks))
    ready = PoolPages([pool])
    assert not ready.step()
    assert not ready.step()
    assert len(asked) == 1


def test_an_engine_without_requests_makes_memory_ready() -> None:
    engine = make_toy().engine
    engine.pages = PoolPages([make_pool()])
    assert exhaust(engine.tend) == 4
