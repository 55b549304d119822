"""Operators under `torch.ops.kvstrata`; `reference` is their specification in plain torch.

Importing this package defines the operators and loads the native kernels where they were built. All are
called through `torch.ops.kvstrata`, but attention through `prepare_attention`, which does a step's work that
is the same for all layers once where the backend has such work. `written_order` is what the native kernels'
bits are held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstrata.kernels import reference, reference_fused, reference_keys, reference_linear, schemas
from kvstrata.kernels.native import backend, keep_freed_memory
from kvstrata.kernels.reference_attention import AttentionPlan

# Operators live only as long as the libraries that define them.
# The reference serves every device; native kernels go before it by the dispatch key CPU.
_LIBRARIES: Final = (
    schemas.define(),
    schemas.register(
        (
            *reference.OPERATORS,
            *reference_fused.OPERATORS,
            *reference_linear.OPERATORS,
            *reference_keys.OPERATORS,
        ),
        "CompositeExplicitAutograd",
    ),
)
_BACKEND: Final = backend()
_paged_attention: Final = torch.ops.kvstrata.paged_attention.default
_chain_keys: Final = torch.ops.kvstrata.chain_keys.default
NATIVE_VERSION: Final = 3  # raised whenever a change of the native kernels may change bits


__all__ = [
    "NATIVE_VERSION",
    "Attention",
    "arithmetic_version",
    "backend",
    "chain_keys",
    "keep_freed_memory",
    "prepare_attention",
]

_NATIVE_DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
)


class Attention(Protocol):
    """One step's attention in any layer of a group."""

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        scale: float,
        sink_query: Tensor | None = None,
        *,
        key_offset: Tensor | None = None,
    ) -> Tensor:
        """The operator `paged_attention` for float32 `query` `[num_tokens, num_heads, head_dim]`."""


def arithmetic_version() -> str:
    """Names what decides the bits of a result; K and V computed under different versions are never mixed."""
    # One version for all instruction sets: tests hold them to the same bits.
    kernels = f"reference-{reference.VERSION}" if _BACKEND == "reference" else f"native-{NATIVE_VERSION}"
    release = torch.__version__.split("+")[0]
    return f"{kernels}/torch-{'.'.join(release.split('.')[:2])}"


@dataclass(frozen=True)
class _NativeAttention:
    """The native operator plans within each call, in microseconds: nothing to prepare."""

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    window: int
    scales: Tensor | None
    windows: Tensor | None
    sinks: Tensor | None

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        scale: float,
        sink_query: Tensor | None = None,
        *,
        key_offset: Tensor | None = None,
    ) -> Tensor:
        batch = (self.block_tables, self.query_starts, self.context_lens)
        seen = (self.window, self.scales, self.windows, self.sinks)
        attended: Tensor = _paged_attention(query, kv, layer, *batch, scale, *seen, sink_query, key_offset)
        return attended


def prepare_attention(  # noqa: PLR0917 (the order of the operator's schema)
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    window: int,
    scales: Tensor | None = None,
    windows: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Attention:
    """Attention of one step for the layers of a group whose pool is `kv`, with its scales.

    The arguments are those of `torch.ops.kvstrata.paged_attention` (see `reference.paged_attention`), which
    gives the same result without preparation. Raises ValueError where they do not fit together.
    """
    if _BACKEND != "reference" and kv.device.type == "cpu" and kv.dtype in _NATIVE_DTYPES:
        return _NativeAttention(block_tables, query_starts, context_lens, window, scales, windows, sinks)
    return AttentionPlan.build(kv, block_tables, query_starts, context_lens, window, scales, windows, sinks)


def chain_keys(parent: bytes, contents: npt.NDArray[np.uint8], key_bytes: int) -> npt.NDArray[np.uint8]:
    """The operator `chain_keys` (see `reference_keys.chain_keys`) for bytes and arrays of them."""
    first = torch.from_numpy(np.array(memoryview(parent)))
    keys: Tensor = _chain_keys(first, torch.from_numpy(contents), key_bytes)
    return keys.numpy()
