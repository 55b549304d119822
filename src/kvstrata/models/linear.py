"""Products with weights and rows of embeddings: dense float weights, or packed quantised ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvstrata import kernels  # noqa: F401  (defines the operators)

from_ops = None
_linear: Final = torch.ops.kvstrata.linear.default
_packed_embedding: Final = torch.ops.kvstrata.packed_embedding.default


class Linear(Protocol):
    """Maps float32 `[num_tokens, in_features]` to float32 `[num_tokens, out_features]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""

    def nbytes(self) -> int:
        """Bytes of its weights in memory."""


class Embedding(Protocol):
    """Maps token ids, int64 `[num_tokens]`, to float32 `[num_tokens, hidden_size]`."""

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows."""

    def nbytes(self) -> int:
        """Bytes of the table in memory."""


@dataclass(frozen=True)
class DenseLinear:
    """Weights `[out_features, in_features]` in a float dtype; activations are rounded to the same dtype."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The product, back in float32."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()

    def nbytes(self) -> int:
        """Bytes of weight and bias in memory."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class DenseEmbedding:
    """A table `[vocab_size, hidden_size]` in a float dtype."""

    table: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows in float32."""
        return F.embedding(ids, self.table).float()

    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.table.nbytes


@dataclass(frozen=True)
class PackedLinear:
    """Weights packed by `torch.ops.kvstrata.pack_weight`, outputs end to end, each in a format of its own.

    Activations are quantised to int8 for each token and group of 32 (see the operator `linear`).
    """

    weights: list[Tensor] = field(default_factory=list)
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        result: Tensor = _linear(x, self.weights, self.bias)
        return result

    def nbytes(self) -> int:
        """Bytes of weights and bias in memory."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return sum(weight.nbytes for weight in self.weights) + bias


@dataclass(frozen=True)
class PackedEmbedding:
    """A table packed as a weight `[vocab_size, hidden_size]`: the same memory as a tied head's."""

    weights: list[Tensor]

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows, dequantised."""
        rows: Tensor = _packed_embedding(ids, self.weights[0])
        return rows

    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.weights[0].nbytes
