"""Memory for blocks: page-aligned, costing nothing before it is written, in huge pages where allowed."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from kvstrata.cache.layout import ALIGNMENT
from kvstrata.errors import ConfigError


def block_memory(nbytes: int, device: torch.device, name: str = "kv_memory") -> Tensor:
    """Uninitialised uint8 `[nbytes]`, aligned to 4 KiB. Raises ConfigError where the system has not so much.

    name: of the setting that asks for it.

    On the CPU it is an anonymous mapping that the kernel is asked to back with huge pages: attention walks
    the whole pool, and with 4 KiB pages a tenth of its time goes to address translation. It is private, since
    kernels seldom allow huge pages in shared memory, which Python maps by default.
    """
    try:
        if device.type != "cpu":
            raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
            base = -raw.data_ptr() % ALIGNMENT
            return raw[base : base + nbytes]
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (RuntimeError, MemoryError, OSError, OverflowError):
        raise ConfigError(
            f"{name} asks for {nbytes} bytes in one piece, which the system does not give; ask for less"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them: ordinary pages do
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
