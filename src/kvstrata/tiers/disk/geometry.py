"""How the blocks of one model and layer group lie in files, and what those files are called.

Three files: headers, one after the other; payloads, each at a multiple of 4 KiB; uses, which is only a hint.
The number of a slot is a record's place in all three. Headers lie apart from payloads so that a store of any
size is scanned in one sequential read of a KiB or so a block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvstrata.cache.layout import ALIGNMENT
from kvstrata.tiers.record import header_bytes

Part = Literal["headers", "payloads", "uses"]
PARTS: tuple[Part, ...] = ("headers", "payloads", "uses")
USE_BYTES = 32  # a row in the file of uses
SLOTS_A_PAGE = 128  # ext4 has 340 pieces a page, and a slot may be two

_STEM = re.compile(r"([0-9a-f]{64})\.g(\d{1,5})\.b(\d{1,5})\.p(\d{1,15})", re.ASCII)


@dataclass(frozen=True)
class Geometry:
    """Sizes in bytes of the slots of one (fingerprint, group). payload_bytes: of one block."""

    fingerprint: bytes
    group: int
    block_size: int
    payload_bytes: int

    @property
    def stem(self) -> str:
        """The files' name before the part's."""
        return f"{self.fingerprint.hex()}.g{self.group}.b{self.block_size}.p{self.payload_bytes}"

    @cached_property
    def header_bytes(self) -> int:
        return header_bytes(self.block_size)

    @cached_property
    def stride(self) -> int:
        """Distance between payloads."""
        return round_up(max(1, self.payload_bytes))

    @property
    def slot_bytes(self) -> int:
        """What a slot takes in all three files."""
        return self.stride + self.header_bytes + USE_BYTES

    def charge(self, slots: int, holes: int = 0) -> int:
        """Bytes that files of so many slots take from the disk, at most; `holes` of them have no payload.

        File systems count what they note of a file's pieces as its own: a page for some hundreds of pieces.
        """
        tables = round_up(slots * self.header_bytes) + round_up(slots * USE_BYTES)
        pieces = ALIGNMENT * (2 + slots // SLOTS_A_PAGE) if slots else 0
        return tables + pieces + (slots - holes) * self.stride


def parse_stem(stem: str) -> Geometry | None:
    """What a name stands for, or None if it is no name of ours."""
    match = _STEM.fullmatch(stem)
    if match is None:
        return None
    geometry = Geometry(bytes.fromhex(match[1]), int(match[2]), int(match[3]), int(match[4]))
    return geometry if geometry.stem == stem else None


def round_up(nbytes: int) -> int:
    """Bytes up to the next multiple of 4 KiB."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def runs(slots: list[int], most: int) -> list[tuple[int, int]]:
    """Neighbouring slots as (first, count) of at most `most`; `slots` ascend."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and sum(found[-1]) == slot and found[-1][1] < most:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found
