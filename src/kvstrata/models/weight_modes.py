"""How weights are held in memory: `--weights`."""

from __future__ import annotations

from typing import Final

import torch

from kvstrata import kernels
from kvstrata.errors import ConfigError
from kvstrata.kernels.packing import Target

DENSE: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What packed weights of each mode become, for `pack_weight`: `auto` keeps the file's bits.
PACKED: Final[dict[str, Target]] = {"auto": "auto", "int8": "int8", "int4": "int4"}


def resolve(weights: str, device: torch.device) -> str:
    """The mode that will run: `auto` is dense float32 where packed weights have no fast kernels.

    Raises ConfigError for an unknown mode, and for packed weights on a device that has no kernels for them.
    """
    if weights not in DENSE and weights not in PACKED:
        raise ConfigError(f"weights is {weights!r}; choose one of {', '.join((*PACKED, *DENSE))}")
    if weights == "auto" and (kernels.backend() == "reference" or device.type != "cpu"):
        return "fp32"
    if weights in PACKED and kernels.backend() == "reference":
        raise ConfigError(f"weights is {weights!r}, which needs the native kernels; use fp32 or bf16")
    if weights in PACKED and device.type != "cpu":
        raise ConfigError(
            f"weights is {weights!r}, which runs on the CPU only; use fp32 or bf16 on {device.type}"
        )
    return weights
