"""The schema of every operator under `torch.ops.kvstrata`, defined once and apart from any implementation.

Implementations (the plain-torch reference, native ones) register for these schemas by dispatch key, so
callers never know which one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm(Tensor(a!) residual, Tensor x, Tensor weight, float eps) -> Tensor",
    "gated_activation(Tensor gate, Tensor up, str kind) -> Tensor",
    "fused_gated_activation(Tensor gate_up, str kind) -> Tensor",
    "rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    "write_kv(Tensor(a!) kv, int layer, Tensor key, Tensor value, Tensor slots, "
    "Tensor(b!)? scales=None) -> ()",
    "rope_write_kv(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, "
    "Tensor? positions, Tensor slots, Tensor(a!) kv, int layer, Tensor(b!)? scales=None, "
    "Tensor? key_offset=None) -> Tensor",
    "paged_attention(Tensor query, Tensor kv, int layer, Tensor block_tables, Tensor query_starts, "
    "Tensor context_lens, float scale, int window=0, Tensor? scales=None, Tensor? windows=None, "
    "Tensor? sinks=None, Tensor? sink_query=None, Tensor? key_offset=None) -> Tensor",
    "pack_weight(Tensor data, str format, int outputs, int inputs, str target, "
    "Tensor? row_order=None) -> Tensor",
    "linear(Tensor x, Tensor[] weights, Tensor? bias=None) -> Tensor",
    "packed_embedding(Tensor ids, Tensor weight) -> Tensor",
    "finite_rows(Tensor logits) -> Tensor",
    "argmax(Tensor logits) -> Tensor",
    "logsumexp(Tensor logits) -> Tensor",
    "top_k(Tensor logits, int k) -> (Tensor values, Tensor ids)",
    "chain_keys(Tensor parent, Tensor contents, int key_bytes) -> Tensor",
)


def define() -> torch.library.Library:
    """Define the operators; they exist for as long as the returned library is kept."""
    library = torch.library.Library("kvstrata", "DEF")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


def register(functions: Iterable[Callable[..., object]], dispatch_key: str) -> torch.library.Library:
    """Register functions as the operators of their names for as long as the returned library is kept."""
    library = torch.library.Library("kvstrata", "IMPL")  # type: ignore[no-untyped-call]
    for function in functions:
        library.impl(function.__name__, function, dispatch_key)  # type: ignore[no-untyped-call]
    return library
