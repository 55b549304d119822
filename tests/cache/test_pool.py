from __future__ import annotations

import pytest
import torch
from small import layout

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.pool import BlockPool
from kvstrata.errors import ConfigError, IntegrityError


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(layout(head_dim=8), 4, "cpu")


def take(pool: BlockPool) -> int:
    block = pool.allocate()
    assert block is not None
    return block


def test_view_is_block_major_and_aligned(pool: BlockPool) -> None:
    assert pool.kv.shape == (4, 2, 2, 1, 4, 8)
    assert pool.kv.data_ptr() % 4096 == 0
    assert pool.kv[1].data_ptr() - pool.kv[0].data_ptr() == pool.layout.stride_bytes == 4096


def test_payload_is_the_very_bytes_of_a_block(pool: BlockPool) -> None:
    pool.kv.zero_()
    pool.kv[2] = torch.arange(128, dtype=torch.float32).reshape(2, 2, 1, 4, 8)
    payload = pool.payload(2)
    assert payload.shape == (pool.layout.payload_bytes,)
    assert payload.numpy().tobytes() == pool.kv[2].numpy().tobytes()
    pool.copy_block(2, 3)
    assert torch.equal(pool.kv[2], pool.kv[3])
    assert not pool.kv[:2].any()


def test_blocks_are_handed_out_in_order_and_the_last_returned_first(pool: BlockPool) -> None:
    assert [take(pool) for _ in range(4)] == [0, 1, 2, 3]
    assert pool.allocate() is None
    pool.release([1])
    pool.release([3])
    assert [take(pool), take(pool)] == [3, 1]


def test_each_block_is_free_cached_or_held(pool: BlockPool) -> None:
    first, second = take(pool), take(pool)
    pool.keep(first)
    pool.retain([first])
    assert pool.release([first, second]) == []
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 0, 1)
    assert pool.release([first]) == [first]
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 1, 0)
    pool.forget(first)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (4, 0, 0)


def test_forgotten_block_is_free_only_when_its_holder_goes(pool: BlockPool) -> None:
    block = take(pool)
    pool.keep(block)
    pool.forget(block)
    assert pool.num_free == 3
    assert pool.release([block]) == []
    assert pool.num_free == 4


def test_forgetting_a_block_that_is_not_kept_does_nothing(pool: BlockPool) -> None:
    pool.forget(2)
    assert pool.num_free == len(set(pool.free_blocks)) == 4


@pytest.mark.parametrize("blocks", [[0, 0], [1], [0, 1]])
def test_wrong_release_is_refused_whole(pool: BlockPool, blocks: list[int]) -> None:
    assert take(pool) == 0
    pool.retain([0])
    with pytest.raises(IntegrityError):
        pool.release(blocks)
    assert pool.refs.tolist() == [2, 0, 0, 0]
    assert pool.num_free == 3


def test_free_block_is_never_retained(pool: BlockPool) -> None:
    with pytest.raises(IntegrityError, match="free block was retained"):
        pool.retain([0])


def test_pinned_block_stays_held_until_unpinned(pool: BlockPool) -> None:
    block = take(pool)
    pool.keep(block)
    pool.pin([block])
    assert pool.release([block]) == []
    assert pool.num_held == 1
    assert pool.unpin([block]) == [block]
    assert pool.num_cached == 1
    with pytest.raises(IntegrityError, match="without being pinned"):
        pool.unpin([block])


def test_untouched_pool_costs_no_resident_memory() -> None:
    def resident_kib() -> int:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    before = resident_kib()
    pool = BlockPool(layout(), 64 * 1024, "cpu")
    assert pool.num_blocks * pool.layout.stride_bytes == 256 * 2**20
    assert resident_kib() - before < 64 * 1024


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        BlockPool(layout(), 0, "cpu")


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "int4"])
def test_scales_lie_after_the_values_of_their_block_and_move_with_it(name: str) -> None:
    pool = BlockPool(BlockLayout(LayerGroup((0, 1), 1, 64), format_named(name), 4), 3, "cpu")
    assert pool.scales is not None
    assert pool.kv.shape[:5] == pool.scales.shape[:5] == (3, 2, 2, 1, 4)
    assert pool.scales[1].data_ptr() - pool.kv[1].data_ptr() == pool.layout.values_bytes
    assert (
        pool.scales[1, 1, 1, 0, 3, -1:].data_ptr() + pool.scales.element_size() - pool.kv[1].data_ptr()
        == pool.layout.payload_bytes
    )
    for block in range(3):
        pool.payload(block).zero_()
    pool.kv[2].view(torch.uint8).fill_(7)
    pool.scales[2] = 3
    pool.copy_block(2, 0)
    assert torch.equal(pool.payload(0), pool.payload(2))
    assert (pool.scales[0] == 3).all()
    assert not pool.payload(1).any()
