"""Weights packed for the native product: made once when a model loads, then only read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvstrata.kernels.reference_pack import BLOCKS, FLOATS

_linear: Final = torch.ops.kvstrata.linear.default
_embedding: Final = torch.ops.kvstrata.packed_embedding.default
_pack_weight: Final = torch.ops.kvstrata.pack_weight.default

Target = Literal["auto", "int8", "int4"]


@dataclass(frozen=True)
class PackedWeight:
    """One weight. data: uint8 `[bytes]`, self-describing; serves as head and embedding at once."""

    data: Tensor
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids`, int64 `[num_tokens]`, as float32 `[num_tokens, in_features]`."""
        found: Tensor = _embedding(ids, self.data)
        return found


@dataclass(frozen=True)
class PackedLinear:
    """Weights that share an input, multiplied as one: outputs end to end, formats of any mix."""

    weights: tuple[PackedWeight, ...]
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_data", [weight.data for weight in self.weights])

    def __call__(self, x: Tensor) -> Tensor:
        """float32 `[num_tokens, in_features]` to float32 `[num_tokens, sum of out_features]`."""
        product: Tensor = _linear(x, self._data, self.bias)  # type: ignore[attr-defined]
        return product

    def nbytes(self) -> int:
        """Bytes of weights and bias in memory."""
        return sum(weight.nbytes for weight in self.weights) + (0 if self.bias is None else self.bias.nbytes)


def pack(
    format: str,
    shape: Sequence[int],
    data: np.ndarray,
    *,
    target: Target = "auto",
    row_order: np.ndarray | None = None,
) -> PackedWeight:
    """Pack a weight as its file stores it.

    format: a GGML type name, or F32, F16, BF16; shape: `[out_features, in_features]`; data: uint8
    `[rows, bytes per row]`, read-only memory maps included; row_order: int64 `[out_features]`, packed row r
    is data row `row_order[r]`. target `auto` keeps the file's bits where a packed format holds them (Q8_0,
    Q4_0, Q4_1, Q5_0, Q4_K, Q6_K) and quantises to int8 with a scale per 32 inputs otherwise; `int8` and `int4`
    ask for that many bits, by way of float32 where the file has others.
    Raises ValueError where data and shape do not fit together.
    """
    outputs, inputs = shape
    order = None if row_order is None else torch.from_numpy(np.ascontiguousarray(row_order, dtype=np.int64))
    if not _fits(format, target):
        rows = dequantize(data, GGMLQuantizationType[format]).astype(np.float32, copy=False)
        format, data = "F32", rows.view(np.uint8)
    packed: Tensor = _pack_weight(_as_tensor(data), format, outputs, inputs, target, order)
    return PackedWeight(packed, outputs, inputs)


def _fits(format: str, target: Target) -> bool:
    """Whether rows of `format` become `target` without a detour through float32."""
    if format in FLOATS:
        return True
    holds_int8 = format in ("Q8_0", "Q5_0")
    if target == "int8":
        return holds_int8
    return format == "Q4_1" if target == "int4" else format in BLOCKS


def _as_tensor(data: np.ndarray) -> Tensor:
    with (
        warnings.catch_warnings()
    ):  # torch warns of memory it could write to and must not; packing only reads
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
