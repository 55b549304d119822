"""One piece of memory, cut once into slots for blocks: as many for each layer group, so nothing fragments.

A run of tokens has one block in each group, and the blocks of a run come and go together, so that an even
split fits what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.cache.layout import ALIGNMENT
from kvstrata.cache.memory import block_memory, populate
from kvstrata.errors import ConfigError
from kvstrata.tiers.memory import is_short

Bytes = npt.NDArray[np.uint8]

_PORTION_BYTES = 2 << 20  # other threads' mappings wait for one at most


class SlotArena:
    """Slots of each group's payload, page-aligned, in memory that costs nothing before it is written.

    payload_bytes: of a block, by group. Not safe for several threads: its owner has a lock. Raises
    ConfigError for a size without room for a block of each group, or that the system does not give.
    """

    def __init__(self, payload_bytes: Sequence[int], size: int, name: str) -> None:
        strides = [-(-payload // ALIGNMENT) * ALIGNMENT for payload in payload_bytes]
        self.slots = size // sum(strides)
        if self.slots < 1:
            raise ConfigError(f"{name} is {size} bytes; one block takes {sum(strides)}: give more")
        memory = block_memory(self.slots * sum(strides), torch.device("cpu"), name).numpy()
        self._payload_bytes = tuple(payload_bytes)
        self._strides = strides
        self._parts: list[Bytes] = []
        begin = 0
        for stride in strides:
            self._parts.append(memory[begin : begin + self.slots * stride])
            begin += self.slots * stride
        self._free = [list(range(self.slots - 1, -1, -1)) for _ in strides]

    def stride(self, group: int) -> int:
        """Bytes that a slot of a group takes."""
        return self._strides[group]

    def take(self, group: int) -> int | None:
        """A free slot; None where there is none."""
        return self._free[group].pop() if self._free[group] else None

    def give(self, group: int, slot: int) -> None:
        """A slot is free again."""
        self._free[group].append(slot)

    def free(self, group: int) -> int:
        """How many slots are free."""
        return len(self._free[group])

    def view(self, group: int, slot: int) -> Bytes:
        """The payload's bytes: uint8 `[payload_bytes]`."""
        begin = slot * self._strides[group]
        return self._parts[group][begin : begin + self._payload_bytes[group]]

    def populate(self) -> Iterator[None]:
        """Take the arena's pages from the system, some with each step, the first slots first.

        May run beside writes to the slots. Ends early where the system cannot do this, or memory is short:
        pages then come when they are written, as they do without; see `cache.memory.populate`.
        """
        each = max(1, _PORTION_BYTES // sum(self._strides))
        for first in range(0, self.slots, each):
            if is_short():
                return
            for part, stride in zip(self._parts, self._strides, strict=True):
                if not populate(torch.from_numpy(part[first * stride : (first + each) * stride])):
                    return
            yield
