"""What blocks and leases are called on the servers.

`PREFIX:FINGERPRINT:{SEGMENT}:KEY.GROUP`, all in hexadecimal, the fingerprint's first 8 bytes. The segment
in braces is what the ring and a cluster's slots look at, so all of a segment lies together; whoever lists
keys knows where each belongs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvstrata.tiers.tier import Address

_FINGERPRINT_BYTES = 8
_BLOCK = re.compile(
    rb"(?P<prefix>.+):(?P<fp>[0-9a-f]{16}):\{(?P<seg>[0-9a-f]+)\}:(?P<key>[0-9a-f]+)\.(?P<g>\d+)"
)


class BlockName(NamedTuple):
    """A block's name, taken apart. fingerprint: its first bytes."""

    fingerprint: bytes
    segment: bytes
    address: Address


class Names:
    """Names of one model's blocks. prefix: of the store's. fingerprint: of the model."""

    def __init__(self, prefix: str, fingerprint: bytes) -> None:
        self._begin = f"{prefix}:{fingerprint[:_FINGERPRINT_BYTES].hex()}:"

    def block(self, address: Address, segment: bytes) -> bytes:
        """Of a block's record."""
        return f"{self._begin}{{{segment.hex()}}}:{address.key.hex()}.{address.group}".encode()

    def lease(self, segment: bytes) -> bytes:
        """Of the right to compute a segment, on the same server as its blocks."""
        return f"{self._begin}{{{segment.hex()}}}:lease".encode()

    @property
    def pattern(self) -> str:
        """What matches all blocks of this model, for SCAN."""
        return f"{escaped(self._begin)}{{*}}:*.*"


def all_blocks(prefix: str) -> str:
    """What matches the blocks of all models, for SCAN."""
    return f"{escaped(prefix)}:*:{{*}}:*.*"


def parse_block(name: bytes, prefix: str) -> BlockName | None:
    """What a name stands for; None if it is none of a block."""
    match = _BLOCK.fullmatch(name)
    if match is None or match["prefix"] != prefix.encode():
        return None
    try:
        return BlockName(
            bytes.fromhex(match["fp"].decode()),
            bytes.fromhex(match["seg"].decode()),
            Address(bytes.fromhex(match["key"].decode()), int(match["g"])),
        )
    except ValueError:
        return None


def escaped(text: str) -> str:
    """Text that SCAN's patterns take as it is."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
