"""What `kvstrata bench attention` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstrata import kernels
from kvstrata.cache.formats import FORMATS, holds
from kvstrata.cache.layout import BlockLayout, LayerGroup
from kvstrata.cache.pool import BlockPool
from kvstrata.cli.bench.limits import FloatProduct, ReadBandwidth, alternately

_BLOCK_SIZE = 16
_SEQUENCES = 8


@dataclass(frozen=True)
class Shape:
    """Heads of one layer, and how many layers there are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int


@dataclass(frozen=True)
class Row:
    """One measurement: seconds of all layers, and what that is in GB/s or GFLOP/s beside its limit."""

    phase: str
    dtype: str
    sequences: int
    context: int
    seconds: float
    reached: float
    limit: float
    unit: str

    @property
    def name(self) -> str:
        """What was measured: phase, dtype, sequences x tokens of each."""
        return f"{self.phase} {self.dtype} {self.sequences} x {self.context}"

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.reached / self.limit


@dataclass(frozen=True)
class Figures:
    """All rows of one run."""

    backend: str
    threads: int
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """`bandwidth_share` by dtype and context, `product_share` by context, and the rows they come from."""
        shares: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.phase == "decode":
                shares.setdefault(row.dtype, {})[str(row.context)] = row.share
        rows = {
            row.name: {
                "ms": row.seconds * 1000,
                "reached": row.reached,
                "limit": row.limit,
                "unit": row.unit,
                "share": row.share,
            }
            for row in self.rows
        }
        return {
            "bandwidth_share": shares,
            "product_share": {str(row.context): row.share for row in self.rows if row.phase == "prefill"},
            **rows,
            "backend": self.backend,
            "threads": self.threads,
        }


def measure(
    shape: Shape, decodes: Sequence[int], prefills: Sequence[int], repeats: int, threads: int | None
) -> Figures:
    """Measure each KV format and context with `threads` threads (None: torch's own number)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        names = [name for name, fmt in FORMATS.items() if holds(fmt, shape.head_dim)]
        rows = [_decode(shape, name, _SEQUENCES, context, repeats) for name in names for context in decodes]
        rows += [_prefill(shape, tokens, repeats) for tokens in prefills]
        return Figures(kernels.backend(), torch.get_num_threads(), tuple(rows))
    finally:
        torch.set_num_threads(before)


def _decode(shape: Shape, name: str, sequences: int, context: int, repeats: int) -> Row:
    pool, tables = _pool(shape, sequences, context, name)
    query = torch.randn(sequences, shape.num_heads, shape.head_dim)
    lens = torch.full((sequences,), context, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    memory = ReadBandwidth()

    def step() -> None:
        for layer in range(shape.num_layers):
            torch.ops.kvstrata.paged_attention(
                query, pool.kv, layer, tables, starts, lens, shape.head_dim**-0.5, 0, pool.scales
            )

    seconds, limit_seconds = alternately((step, memory.run), repeats)
    reached = pool.num_blocks * pool.layout.payload_bytes / seconds / 1e9
    limit = memory.rate(limit_seconds)
    return Row("decode", name, sequences, context, seconds, reached, limit, "GB/s")


def _prefill(shape: Shape, tokens: int, repeats: int) -> Row:
    one = Shape(shape.num_heads, shape.num_kv_heads, shape.head_dim, 1)
    pool, tables = _pool(one, 1, -(-tokens // _BLOCK_SIZE) * _BLOCK_SIZE, "bf16")
    query = torch.randn(tokens, shape.num_heads, shape.head_dim)
    lens, starts = torch.tensor([tokens]).int(), torch.tensor([0, tokens]).int()
    product = FloatProduct()

    def attend() -> None:
        torch.ops.kvstrata.paged_attention(query, pool.kv, 0, tables, starts, lens, shape.head_dim**-0.5)

    seconds, limit_seconds = alternately((attend, product.run), repeats)
    operations = 2 * tokens * (tokens + 1) * shape.num_heads * shape.head_dim
    limit = product.rate(limit_seconds)
    return Row("prefill", "bf16", 1, tokens, seconds, operations / seconds / 1e9, limit, "GFLOP/s")


def _pool(shape: Shape, sequences: int, context: int, name: str) -> tuple[BlockPool, Tensor]:
    """A pool of all layers as the engine has it, every byte written, and shuffled block tables over it."""
    num_blocks = sequences * context // _BLOCK_SIZE
    group = LayerGroup(tuple(range(shape.num_layers)), shape.num_kv_heads, shape.head_dim)
    pool = BlockPool(BlockLayout(group, FORMATS[name], _BLOCK_SIZE), num_blocks, "cpu")
    if pool.scales is None:
        pool.kv.fill_(0.01)
    else:
        pool.kv.view(torch.uint8).fill_(0x21)
        pool.scales.fill_(0.01)
    return pool, torch.randperm(num_blocks).int().view(sequences, -1)
