"""The one seam between weight files and the decoder: canonical names, whatever the file calls them.

Canonical names, with L the layer index (PyTorch layout, `[out_features, in_features]`):

    embed.weight                      [vocab_size, hidden_size]
    layers.L.attn_norm.weight         [hidden_size]
    layers.L.q.weight / .bias         [num_heads * head_dim, hidden_size]     rows in half-rotation RoPE order
    layers.L.k.weight / .bias         [num_kv_heads * head_dim, hidden_size]  rows in half-rotation RoPE order
    layers.L.v.weight / .bias         [num_kv_heads * head_dim, hidden_size]
    layers.L.o.weight / .bias         [hidden_size, num_heads * head_dim]
    layers.L.q_norm.weight, .k_norm.weight         [head_dim]       (config.qk_norm)
    layers.L.post_attn_norm.weight, .post_mlp_norm.weight [hidden_size]  (config.sandwich_norms)
    layers.L.mlp_norm.weight          [hidden_size]
    layers.L.gate.weight, .up.weight  [intermediate_size, hidden_size]  (.bias with config.mlp_bias)
    layers.L.down.weight              [hidden_size, intermediate_size]  (.bias with config.mlp_bias)
    final_norm.weight                 [hidden_size]
    head.weight                       [vocab_size, hidden_size]   (absent with config.tied_embeddings)

Norm weights are in the form `x * w`: a source whose file stores `w - 1` adds the one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvstrata.models.config import DecoderConfig


@dataclass(frozen=True)
class RawTensor:
    """A tensor as its file stores it, memory-mapped: what kernels pack without a detour through float32."""

    format: str  # GGML type name ("Q4_1", "Q8_0", "F32", ...) or "F32"/"F16"/"BF16" of a safetensors file
    shape: tuple[int, ...]  # PyTorch order: [out_features, in_features]
    data: np.ndarray  # uint8, [rows, bytes per row] (one row for vectors)
    row_order: np.ndarray | None = None  # int64 [rows]: canonical row r is file row row_order[r]


class WeightSource(Protocol):
    """Weights under canonical names. Memory-mapped: nothing is read before it is asked for."""

    config: DecoderConfig

    def names(self) -> Iterable[str]:
        """Canonical names present."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor dequantised to float32. Raises ModelError naming file and offset where it cannot be."""

    def raw(self, name: str) -> RawTensor:
        """The tensor as stored."""

    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""

    def close(self) -> None:
        """Unmap the files."""


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor that a model of this configuration has, with its shape."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    norms = ["attn_norm", "mlp_norm"]
    if config.sandwich_norms:
        norms += ["post_attn_norm", "post_mlp_norm"]
    linears = {  # name: (out_features, in_features, has a bias)
        "q": (q_rows, hidden, config.qkv_bias),
        "k": (kv_rows, hidden, config.qkv_bias),
        "v": (kv_rows, hidden, config.qkv_bias),
        "o": (hidden, q_rows, config.output_bias),
        "gate": (inner, hidden, config.mlp_bias),
        "up": (inner, hidden, config.mlp_bias),
        "down": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for norm in norms:
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}q_norm.weight"] = (head,)
            shapes[f"{prefix}k_norm.weight"] = (head,)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["final_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, hidden)
    return shapes
