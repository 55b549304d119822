"""How the K and V of a block lie in memory: the same bytes in the pool and in a tier's record.

Block-major: `[num_blocks, group_layers, 2, num_kv_heads, block_size, head_dim]`, the scales of quantised
formats after all values of their block, and each block's stride rounded up to 4 KiB, so that a block is one
contiguous, aligned piece that a tier can move as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.errors import ConfigError

ALIGNMENT = 4096  # bytes; pages, and O_DIRECT's usual granularity


@dataclass(frozen=True)
class KVFormat:
    """How one key or value vector is stored.

    bits: per element. scale_bytes: per scale group. scale_group: elements that share a scale (0: none;
    -1: the whole head vector). centred: keys are stored without what they have in common, which is worth it
    where bits are few.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    scale_group: int = 0
    centred: bool = False

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one head's vector of `head_dim` elements, without scales."""
        return -(-head_dim * self.bits // 8)

    def vector_scale_bytes(self, head_dim: int) -> int:
        """Bytes of the scales of one head's vector."""
        if self.scale_group == 0:
            return 0
        groups = 1 if self.scale_group == -1 else -(-head_dim // self.scale_group)
        return groups * self.scale_bytes


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens: all of them (window None), or the last `window`."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class BlockLayout:
    """Sizes in bytes of one block of a group in a format."""

    group: LayerGroup
    format: KVFormat
    block_size: int

    @property
    def values_bytes(self) -> int:
        vectors = len(self.group.layers) * 2 * self.group.num_kv_heads * self.block_size
        return vectors * self.format.vector_bytes(self.group.head_dim)

    @property
    def scales_bytes(self) -> int:
        vectors = len(self.group.layers) * 2 * self.group.num_kv_heads * self.block_size
        return vectors * self.format.vector_scale_bytes(self.group.head_dim)

    @property
    def payload_bytes(self) -> int:
        """What a tier's record carries."""
        return self.values_bytes + self.scales_bytes

    @property
    def stride_bytes(self) -> int:
        """Distance between blocks in the pool."""
        return -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT


def bytes_per_token(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of the K and V of a token in all layer groups of one cache, scales included."""
    return sum(layout.payload_bytes for layout in layouts) // layouts[0].block_size


def check_layouts(layouts: Sequence[BlockLayout], num_blocks: Sequence[int]) -> None:
    """Raise ConfigError unless these are the layouts and pool sizes of the groups of one cache."""
    if not layouts or len(layouts) != len(num_blocks):
        raise ConfigError(
            f"{len(layouts)} layouts, {len(num_blocks)} pool sizes: give one of each a layer group"
        )
    sizes = {layout.block_size for layout in layouts}
    if len(sizes) > 1 or min(sizes) < 1:
        raise ConfigError(f"block sizes are {sorted(sizes)}: all layer groups share one, of at least 1 token")
