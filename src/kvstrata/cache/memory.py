"""Memory for blocks: page-aligned, costing nothing before it is written, in huge pages where allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.cache.layout import ALIGNMENT
from kvstrata.errors import ConfigError
from kvstrata.kernels.memory import huge_pages


def block_memory(nbytes: int, device: torch.device, name: str = "kv_memory") -> Tensor:
    """Uninitialised uint8 `[nbytes]`, aligned to 4 KiB. Raises ConfigError where the system has not so much.

    name: of the setting that asks for it.

    On the CPU it is in huge pages: attention walks the whole pool, and with 4 KiB pages a tenth of its time
    goes to address translation.
    """
    try:
        if device.type != "cpu":
            raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
            base = -raw.data_ptr() % ALIGNMENT
            return raw[base : base + nbytes]
        return huge_pages(nbytes)
    except (RuntimeError, MemoryError, OSError, OverflowError):
        raise ConfigError(
            f"{name} asks for {nbytes} bytes in one piece, which the system does not give; ask for less"
        ) from None
