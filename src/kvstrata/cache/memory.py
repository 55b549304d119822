"""Memory for blocks: page-aligned, costing nothing before it is written, in huge pages where allowed."""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from kvstrata.cache.layout import ALIGNMENT
from kvstrata.errors import ConfigError
from kvstrata.kernels.memory import huge_pages

# Of madvise, since Linux 5.14: pages are there as if written to, and keep their bytes.
_POPULATE_WRITE: Final = 23


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


def populate(memory: Tensor) -> bool:
    """Whether the pages of this memory are there now, with their bytes as they were: whole pages on the CPU.

    The first write to a page costs many times what later ones do, most of all in a virtual machine whose
    host has to find it too. May run beside writes. False where the system cannot do this: pages then come
    when they are written.
    """
    if memory.device.type != "cpu":
        return False
    # By ctypes, since `mmap.madvise` keeps other threads from running meanwhile.
    try:
        madvise = ctypes.CDLL(None).madvise
    except AttributeError:
        return False
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    return bool(madvise(address, size, ctypes.c_int(_POPULATE_WRITE)) == 0)
