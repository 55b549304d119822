"""Products with weights, behind one seam so that quantised weights can take their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class Linear(Protocol):
    """Maps float32 `[num_tokens, in_features]` to float32 `[num_tokens, out_features]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""

    def nbytes(self) -> int:
        """Bytes of its weights in memory."""


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
