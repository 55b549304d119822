"""Memory in huge pages: what is read front to back at every step should not wait for address translation."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = 32 << 20
_LINE: Final = 64


def huge_pages(nbytes: int) -> Tensor:
    """Zeros, uint8 `[nbytes]`, that cost nothing before they are written, in huge pages where allowed.

    The mapping is private, since kernels seldom allow huge pages in shared memory, which Python maps by
    default. Raises OSError, MemoryError or OverflowError where the system has not so much.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them: ordinary pages do
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class Shelf:
    """Lays tensors of bytes side by side in huge pages, with room in reserve that is not touched yet."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def put(self, data: Tensor) -> Tensor:
        """A copy of contiguous uint8 `[bytes]` on the shelf, at 64 bytes; `data` where memory is short."""
        size = -(-len(data) // _LINE) * _LINE
        if size > len(self._room):
            try:
                self._room = huge_pages(max(size, _CHUNK))
            except (OSError, MemoryError):
                return data
        kept, self._room = self._room[: len(data)], self._room[size:]
        return kept.copy_(data)
