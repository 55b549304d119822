"""A decoder of any configuration with random weights, for measurements that need no file."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kvstrata.models.config import DecoderConfig
from kvstrata.models.decoder import Decoder
from kvstrata.models.weights import RawTensor, expected_shapes

_SPREAD = 0.02  # small enough that no activation grows layer by layer


def random_decoder(config: DecoderConfig, weights: str) -> Decoder:
    """A decoder on the CPU; weights: as for `Decoder.load`."""
    return Decoder.load(_RandomSource(config), weights=weights, device=torch.device("cpu"))


class _RandomSource:
    """Float32 tensors, the same each time, made when they are asked for."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._shapes = expected_shapes(config)

    def names(self) -> Iterable[str]:
        """All tensors of the configuration."""
        return self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Normally distributed values."""
        values = np.random.default_rng(0).standard_normal(self._shapes[name], dtype=np.float32)
        return torch.from_numpy(values * np.float32(_SPREAD))

    def raw(self, name: str) -> RawTensor:
        """The same as bytes."""
        values = self.tensor(name)
        rows = values.reshape(-1, values.shape[-1]).numpy()
        return RawTensor("F32", tuple(values.shape), rows.view(np.uint8))

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(4 * int(np.prod(shape)) for shape in self._shapes.values())

    def close(self) -> None:
        """Nothing is open."""
