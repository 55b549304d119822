"""The block memory of one layer group, and who owns which block of it.

A block is free (nobody's), held (in at least one block table, or pinned by a reader), or cached (in no
table, but kept because its content can be found). `free + cached + held = total` at every moment.

The memory is not touched before it is written or populated, so a pool costs resident memory only for blocks
that were used once or are to come next; blocks that come back are used again first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstrata.cache.formats import check_head_dim, pool_dtype, scale_dtype
from kvstrata.cache.layout import BlockLayout
from kvstrata.cache.memory import block_memory, populate
from kvstrata.errors import ConfigError, IntegrityError

BlockIds = Sequence[int] | npt.NDArray[np.int64]


class BlockPool:
    """`num_blocks` blocks in one allocation, aligned to 4 KiB, `layout.stride_bytes` apart.

    kv: the blocks as attention reads them, `[num_blocks, group_layers, 2, num_kv_heads, block_size,
    head_dim]` in the format's dtype (int4: `head_dim / 2` bytes). scales: those of a quantised format, at the
    end of their block, `[num_blocks, group_layers, 2, num_kv_heads, block_size, scales a vector]`.
    most_held: the most blocks that were held at a time. reached: those from this one on were never used.
    refs: int32 `[num_blocks]`, holders of each block, pins included.
    kept: bool `[num_blocks]`, whether a block without holders stays cached.

    Raises ConfigError for a pool without blocks or a format that the pool cannot hold.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device | str) -> None:
        if num_blocks < 1:
            raise ConfigError(
                f"num_blocks is {num_blocks}: a pool needs at least 1 block, give it more memory"
            )
        check_head_dim(layout.format, layout.group.head_dim)
        self.layout = layout
        self.num_blocks = num_blocks
        stride = layout.stride_bytes
        memory = block_memory(num_blocks * stride, torch.device(device))
        self._blocks = memory.view(num_blocks, stride)
        dtype = pool_dtype(layout.format)
        width = layout.format.vector_bytes(layout.group.head_dim) // dtype.itemsize
        self.kv = _typed_view(memory, layout, num_blocks, dtype, width, 0)
        self.scales = _scales_view(memory, layout, num_blocks)
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.pins: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self.kept: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._places = np.zeros(num_blocks, dtype=np.int64)  # of blocks among those released last
        self._cached = 0
        self.most_held = 0
        self.reached = 0

    @property
    def num_free(self) -> int:
        """Blocks that are nobody's."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without holders whose content is kept."""
        return self._cached

    @property
    def num_held(self) -> int:
        """Blocks with holders."""
        return self.num_blocks - len(self._free) - self._cached

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks, the next to be allocated last."""
        return tuple(self._free)

    def payload(self, block: int) -> Tensor:
        """The bytes of a block that a tier moves: uint8 `[layout.payload_bytes]`, a view of the pool."""
        return self._blocks[block, : self.layout.payload_bytes]

    def copy_block(self, src: int, dst: int) -> None:
        """Copy the content of a block in all layers."""
        self.payload(dst).copy_(self.payload(src))

    def populate(self, blocks: range) -> bool:
        """Take the memory of neighbouring blocks from the system, as `memory.populate` does."""
        return populate(self._blocks[blocks.start : blocks.stop])

    def allocate(self) -> int | None:
        """Take a free block, with one holder; None where there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        self.refs[block] = 1
        self.reached = max(self.reached, block + 1)
        self.most_held = max(self.most_held, self.num_held)
        return block

    def idle_among(self, blocks: BlockIds) -> int:
        """How many of these distinct blocks are cached and would leave the cached ones when retained."""
        return int(np.count_nonzero(self.refs[np.asarray(blocks, dtype=np.int64)] == 0))

    def retain(self, blocks: BlockIds) -> None:
        """One more holder for each of these held or cached, distinct blocks.

        Raises IntegrityError for a free one.
        """
        ids = np.asarray(blocks, dtype=np.int64)
        idle = self.refs[ids] == 0
        if not self.kept[ids[idle]].all():
            raise IntegrityError(f"a free block was retained: one of {ids[idle].tolist()}")
        self.refs[ids] += 1
        self._cached -= int(np.count_nonzero(idle))
        self.most_held = max(self.most_held, self.num_held)

    def release(self, blocks: BlockIds) -> list[int]:
        """One holder less for each of these distinct blocks; returns those that are cached from now on.

        Those left without a holder that are not kept go back to the free ones, the last of them to be
        allocated first. Raises IntegrityError, with nothing changed, for a block that has no holder or is
        given twice.
        """
        ids = np.asarray(blocks, dtype=np.int64)
        places = np.arange(len(ids))
        self._places[ids] = places
        if (self._places[ids] != places).any():  # of two of the same only one place was kept
            raise IntegrityError(f"a block was released twice at once: {ids.tolist()}")
        refs = self.refs[ids] - 1
        if (refs < 0).any():
            raise IntegrityError(f"a block without holders was released: one of {ids[refs < 0].tolist()}")
        self.refs[ids] = refs
        idle = ids[refs == 0]
        kept = self.kept[idle]
        self._free.extend(idle[~kept].tolist())
        cached: list[int] = idle[kept].tolist()
        self._cached += len(cached)
        return cached

    def keep(self, block: int) -> None:
        """Let a held block stay cached when its last holder goes."""
        self.kept[block] = True

    def forget(self, block: int) -> None:
        """Let a kept block go: a cached one is free at once, a held one when its last holder goes."""
        if self.kept[block] and self.refs[block] == 0:
            self._cached -= 1
            self._free.append(block)
        self.kept[block] = False

    def pin(self, blocks: BlockIds) -> None:
        """Hold distinct blocks for a reader outside the block tables: neither evicted nor written again."""
        self.retain(blocks)
        self.pins[np.asarray(blocks, dtype=np.int64)] += 1

    def unpin(self, blocks: BlockIds) -> list[int]:
        """Undo one `pin`; returns those that are cached from now on.

        Raises IntegrityError for one not pinned.
        """
        ids = np.asarray(blocks, dtype=np.int64)
        if (self.pins[ids] < 1).any():
            raise IntegrityError(f"a block was unpinned without being pinned: one of {ids.tolist()}")
        cached = self.release(ids)
        self.pins[ids] -= 1
        return cached


def _scales_view(aligned: Tensor, layout: BlockLayout, num_blocks: int) -> Tensor | None:
    dtype = scale_dtype(layout.format)
    if dtype is None:
        return None
    width = layout.format.vector_scale_bytes(layout.group.head_dim) // dtype.itemsize
    return _typed_view(aligned, layout, num_blocks, dtype, width, layout.values_bytes)


def _typed_view(  # noqa: PLR0917
    aligned: Tensor, layout: BlockLayout, num_blocks: int, dtype: torch.dtype, width: int, offset: int
) -> Tensor:
    """`width` elements for each vector of a block, from byte `offset` of it on."""
    group = layout.group
    shape = (num_blocks, len(group.layers), 2, group.num_kv_heads, layout.block_size, width)
    strides = [1]
    for size in reversed(shape[2:]):
        strides.insert(0, strides[0] * size)
    typed = aligned.view(dtype)
    block_stride = layout.stride_bytes // typed.element_size()
    start = typed.storage_offset() + offset // typed.element_size()
    return typed.as_strided(shape, (block_stride, *strides), start)
