"""A quantised pool with one sequence in it, and what a specification says of what it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.cache.formats import format_named
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.pool import BlockPool
from kvstrata.kernels import kv_formats

ops = torch.ops.kvstrata
LAYER = 1


class Case:
    """One sequence in shuffled blocks of a pool whose every other byte makes a NaN."""

    def __init__(
        self, fmt: str, length: int, *, head_dim: int = 64, block_size: int = 16, kv_heads: int = 2
    ) -> None:
        layout = BlockLayout(LayerGroup((0, 1, 2), kv_heads, head_dim), format_named(fmt), block_size)
        num_blocks = -(-length // block_size) + 2
        self.pool = BlockPool(layout, num_blocks, "cpu")
        for block in range(num_blocks):
            self.pool.payload(block).fill_(0xFF)
        self.table = torch.randperm(num_blocks).int()[None, : num_blocks - 2]
        self.key = torch.randn(length, kv_heads, head_dim)
        self.value = torch.randn(length, kv_heads, head_dim)
        positions = torch.arange(length)
        self.slots = self.table[0, positions // block_size].long() * block_size + positions % block_size
        self.scale = head_dim**-0.5
        self.length = length

    def write(self) -> None:
        ops.write_kv(self.pool.kv, LAYER, self.key, self.value, self.slots, self.pool.scales)

    def stored(self, part: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of all tokens, in order."""
        size = self.pool.layout.block_size
        blocks, offsets = self.slots // size, self.slots % size
        kv, scales = self.pool.kv, self.pool.scales
        assert scales is not None
        codes = kv.view(torch.uint8)[blocks, LAYER, part, :, offsets].view(kv.dtype)
        return codes, scales[blocks, LAYER, part, :, offsets]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values as attention sees them; int4 keys are rotated."""
        key, value = (kv_formats.dequantise(*self.stored(part)) for part in (0, 1))
        return key, value

    def attend(self, query: Tensor, length: int, window: int = 0) -> Tensor:
        starts, lens = torch.tensor([0, len(query)]).int(), torch.tensor([length]).int()
        return ops.paged_attention(
            query, self.pool.kv, LAYER, self.table, starts, lens, self.scale, window, self.pool.scales
        )

    def expected(self, query: Tensor, window: int = 0) -> Tensor:
        """Of the last rows, in float64 over what the pool holds."""
        keys, values = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in self.read())
        if self.pool.kv.dtype == torch.uint8:
            query = kv_formats.rotate(query)
        positions = torch.arange(self.length - len(query), self.length).unsqueeze(1)
        seen = torch.arange(self.length) <= positions
        if window:
            seen &= torch.arange(self.length) > positions - window
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * self.scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
