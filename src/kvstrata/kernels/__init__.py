"""Operators under `torch.ops.kvstrata`; `reference` is their specification in plain torch.

Importing this package defines the operators. `rms_norm`, `gated_activation`, `rope` and `write_kv` are called
through `torch.ops.kvstrata`; attention through `prepare_attention`, which does a step's work that is the same
for all layers once where the backend has such work.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from kvstrata.kernels import reference, schemas
from kvstrata.kernels.reference_attention import AttentionPlan

# Operators live only as long as the libraries that define them.
_LIBRARIES: Final = (schemas.define(), reference.register())


class Attention(Protocol):
    """One step's attention in any layer of a group."""

    def attend(self, query: Tensor, kv: Tensor, layer: int, scale: float) -> Tensor:
        """The operator `paged_attention` for float32 `query` `[num_tokens, num_heads, head_dim]`."""


def backend() -> str:
    """The name of the implementation that runs on the CPU."""
    return "reference"


def arithmetic_version() -> str:
    """Names what decides the bits of a result; K and V computed under different versions are never mixed."""
    release = torch.__version__.split("+")[0]
    return f"{backend()}-{reference.VERSION}/torch-{'.'.join(release.split('.')[:2])}"


def prepare_attention(
    kv: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, window: int
) -> Attention:
    """Attention of one step for the layers of a group whose pool is `kv`.

    The arguments are those of `torch.ops.kvstrata.paged_attention` (see `reference.paged_attention`), which
    gives the same result without preparation. Raises ValueError where they do not fit together.
    """
    return AttentionPlan.build(kv, block_tables, query_starts, context_lens, window)
