"""The schema of every operator under `torch.ops.kvstrata`, defined once and apart from any implementation.

Implementations (the plain-torch reference, native ones) register for these schemas by dispatch key, so
callers never know which one runs.
"""

from __future__ import annotations

import torch

SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "gated_activation(Tensor gate, Tensor up, str kind) -> Tensor",
    "rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    "write_kv(Tensor(a!) kv, int layer, Tensor key, Tensor value, Tensor slots) -> ()",
    "paged_attention(Tensor query, Tensor kv, int layer, Tensor block_tables, Tensor query_starts, "
    "Tensor context_lens, float scale, int window=0) -> Tensor",
)


def define() -> torch.library.Library:
    """Define the operators; they exist for as long as the returned library is kept."""
    library = torch.library.Library("kvstrata", "DEF")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library
