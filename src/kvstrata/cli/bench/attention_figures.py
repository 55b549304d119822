"""What `kvstrata bench attention` measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstrata import kernels
from kvstrata.cache.layout import ALIGNMENT

_BLOCK_SIZE = 16
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DECODES = ((8, 512), (8, 2048), (1, 4096))  # sequences, tokens of each
_PREFILLS = (1024, 4000)
_READ_BYTES = 256 << 20  # far more than the caches hold
_PRODUCT_SIZE = 1024


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
    context: str
    seconds: float
    reached: float
    limit: float
    unit: str

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
        """`bandwidth_share` and `product_share` by dtype and context, and the rows they come from."""
        shares: dict[str, dict[str, dict[str, float]]] = {"decode": {}, "prefill": {}}
        for row in self.rows:
            shares[row.phase].setdefault(row.dtype, {})[row.context] = row.share
        rows = [
            {
                "phase": row.phase,
                "dtype": row.dtype,
                "context": row.context,
                "ms": row.seconds * 1000,
                "reached": row.reached,
                "limit": row.limit,
                "unit": row.unit,
            }
            for row in self.rows
        ]
        return {
            "bandwidth_share": shares["decode"],
            "product_share": shares["prefill"],
            "backend": self.backend,
            "threads": self.threads,
            "rows": rows,
        }


def measure(shape: Shape, repeats: int, threads: int | None) -> Figures:
    """Measure each dtype and context with `threads` threads (None: torch's own number)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        rows = [
            _decode(shape, name, sequences, context, repeats)
            for name in _DTYPES
            for sequences, context in _DECODES
        ]
        rows += [_prefill(shape, tokens, repeats) for tokens in _PREFILLS]
        return Figures(kernels.backend(), torch.get_num_threads(), tuple(rows))
    finally:
        torch.set_num_threads(before)


def _decode(shape: Shape, name: str, sequences: int, context: int, repeats: int) -> Row:
    kv, tables = _pool(shape, sequences, context, _DTYPES[name])
    query = torch.randn(sequences, shape.num_heads, shape.head_dim)
    lens = torch.full((sequences,), context, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    reading = torch.ones(_READ_BYTES // 4)

    def step() -> None:
        for layer in range(shape.num_layers):
            torch.ops.kvstrata.paged_attention(query, kv, layer, tables, starts, lens, shape.head_dim**-0.5)

    seconds, limit_seconds = _alternately(step, reading.sum, repeats)
    num_bytes = sequences * context * 2 * shape.num_kv_heads * shape.head_dim * kv.element_size()
    reached = num_bytes * shape.num_layers / seconds / 1e9
    limit = _READ_BYTES / limit_seconds / 1e9
    return Row("decode", name, f"{sequences} x {context}", seconds, reached, limit, "GB/s")


def _prefill(shape: Shape, tokens: int, repeats: int) -> Row:
    one = Shape(shape.num_heads, shape.num_kv_heads, shape.head_dim, 1)
    kv, tables = _pool(one, 1, -(-tokens // _BLOCK_SIZE) * _BLOCK_SIZE, torch.bfloat16)
    query = torch.randn(tokens, shape.num_heads, shape.head_dim)
    lens, starts = torch.tensor([tokens]).int(), torch.tensor([0, tokens]).int()
    left, right = torch.randn(2, _PRODUCT_SIZE, _PRODUCT_SIZE)

    def attend() -> None:
        torch.ops.kvstrata.paged_attention(query, kv, 0, tables, starts, lens, shape.head_dim**-0.5)

    seconds, limit_seconds = _alternately(attend, lambda: left @ right, repeats)
    operations = 2 * tokens * (tokens + 1) * shape.num_heads * shape.head_dim
    limit = 2 * _PRODUCT_SIZE**3 / limit_seconds / 1e9
    return Row("prefill", "bf16", f"1 x {tokens}", seconds, operations / seconds / 1e9, limit, "GFLOP/s")


def _pool(shape: Shape, sequences: int, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A pool of all layers, blocks aligned as in the engine, and shuffled block tables over it."""
    num_blocks = sequences * context // _BLOCK_SIZE
    numel = shape.num_layers * 2 * shape.num_kv_heads * _BLOCK_SIZE * shape.head_dim
    stride = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize
    memory = torch.full((num_blocks, stride), 0.01, dtype=dtype)
    kv = memory[:, :numel].view(
        num_blocks, shape.num_layers, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim
    )
    return kv, torch.randperm(num_blocks).int().view(sequences, -1)


def _alternately(
    measured: Callable[[], object], limit: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Seconds of the best run of each, taken in turns so that both meet the same machine."""
    measured()
    limit()
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for index, run in enumerate((measured, limit)):
            began = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began)
    return best[0], best[1]
