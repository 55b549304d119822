"""How many bytes a KV cache takes.

    bytes per token    = sum over layers, of the vectors that a layer keeps, of elements * bits / 8 + scales
    bytes per sequence = sum over layers of bytes per token * min(length, window) + fixed state
    total              = batch * bytes per sequence

For equal full-attention layers that is 2 * layers * KV heads * head size * bytes * length * batch. The pool
gives memory out in blocks, so what it allocates is a little more: `allocated_bytes` counts that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstrata.cache.layout import ALIGNMENT, BlockLayout, KVFormat
from kvstrata.cache.shapes import CacheShape, LayerCache, VectorSet
from kvstrata.errors import ConfigError


@dataclass(frozen=True)
class KindSize:
    """Equal layers in one format together. bytes_per_token: of all of them. kept_tokens: of a sequence of
    the asked length.

    allocated_bytes: of one sequence, in whole blocks, each block aligned as the pool does.
    """

    layer: LayerCache
    format: KVFormat
    num_layers: int
    bytes_per_token: int
    kept_tokens: int
    state_bytes: int
    allocated_bytes: int

    @property
    def bytes_per_sequence(self) -> int:
        return self.bytes_per_token * self.kept_tokens + self.state_bytes


@dataclass(frozen=True)
class CacheSize:
    """The cache of `batch` sequences of `length` tokens. All sizes in bytes.

    format: of all layers that have no other, see `kinds`.
    mha_bytes_per_sequence: what the same model would need with a K and a V a query head in every layer, kept
    for all tokens.
    """

    format: KVFormat
    batch: int
    length: int
    block_size: int
    kinds: tuple[KindSize, ...]
    mha_bytes_per_sequence: int

    @property
    def bytes_per_token(self) -> int:
        """What one more token adds while no window is full."""
        return sum(kind.bytes_per_token for kind in self.kinds)

    @property
    def bytes_per_token_past_windows(self) -> int:
        """What one more token adds once every window is full."""
        return sum(kind.bytes_per_token for kind in self.kinds if kind.layer.window is None)

    @property
    def state_bytes(self) -> int:
        """What a sequence needs whatever its length."""
        return sum(kind.state_bytes for kind in self.kinds)

    @property
    def bytes_per_sequence(self) -> int:
        return sum(kind.bytes_per_sequence for kind in self.kinds)

    @property
    def total_bytes(self) -> int:
        return self.batch * self.bytes_per_sequence

    @property
    def allocated_bytes_per_sequence(self) -> int:
        """In whole aligned blocks; a window's as many as it ever touches up to this length."""
        return sum(kind.allocated_bytes for kind in self.kinds)

    @property
    def allocated_bytes(self) -> int:
        return self.batch * self.allocated_bytes_per_sequence

    @property
    def mha_factor(self) -> float:
        """How many times more MHA would take at this length."""
        return self.mha_bytes_per_sequence / self.bytes_per_sequence

    def sequences_that_fit(self, memory_bytes: int) -> int:
        """Sequences of this length that the pool holds in `memory_bytes`, whole blocks counted."""
        return max(0, memory_bytes) // self.allocated_bytes_per_sequence


def vectors_bytes(vectors: Sequence[VectorSet], fmt: KVFormat) -> int:
    """Bytes of these vectors of one token, scales included."""
    return sum(v.count * (fmt.vector_bytes(v.dim) + fmt.vector_scale_bytes(v.dim)) for v in vectors)


def window_blocks(window: int, length: int, block_size: int) -> int:
    """Most blocks that a window touches at a time while a sequence grows to `length` tokens."""
    return min(-(-length // block_size), -(-(window - 1) // block_size) + 1)


def cache_size(
    shape: CacheShape,
    fmt: KVFormat,
    *,
    length: int,
    batch: int = 1,
    block_size: int = 16,
    others: Mapping[int, KVFormat] | None = None,
) -> CacheSize:
    """The size of the cache of `batch` sequences of `length` tokens. Raises ConfigError naming the field.

    others: formats of layers that have not `fmt`, by their number.
    """
    for name, value in (("length", length), ("batch", batch), ("block_size", block_size)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be a whole number above zero")
    kinds = []
    for (layer, own), count in _counted(shape, fmt, others or {}).items():
        per_token = count * vectors_bytes(layer.vectors, own)
        kept = 0 if not layer.vectors else length if layer.window is None else min(length, layer.window)
        blocks = -(-length // block_size)
        if layer.window is not None:
            blocks = window_blocks(layer.window, length, block_size)
        stride = _aligned(per_token * block_size)
        state = count * layer.state_bytes
        kinds.append(KindSize(layer, own, count, per_token, kept, state, blocks * stride + state))
    mha = length * sum(vectors_bytes(layer.mha, fmt) for layer in shape.layers)
    return CacheSize(fmt, batch, length, block_size, tuple(kinds), mha)


def _counted(
    shape: CacheShape, fmt: KVFormat, others: Mapping[int, KVFormat]
) -> dict[tuple[LayerCache, KVFormat], int]:
    """How many layers there are of each kind and format, in the order of the first of them."""
    return dict(Counter((layer, others.get(index, fmt)) for index, layer in enumerate(shape.layers)))


def split_blocks(
    memory_bytes: int,
    layouts: Sequence[BlockLayout],
    *,
    max_num_seqs: int,
    max_chunk: int,
    max_model_len: int,
) -> list[int]:
    """Blocks for each layer group, so that together they fit in `memory_bytes`.

    Groups that see furthest get the same number N, as large as fits: every token of theirs stays useful to a
    later request. A window group gets at most what `max_num_seqs` sequences touch at once, each its window
    and a prefill chunk of `max_chunk` tokens, never more than `max_model_len` tokens; the rest goes into N.
    Raises ConfigError where not even one block a group fits.
    """
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_chunk", max_chunk),
        ("max_model_len", max_model_len),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be a whole number above zero")
    one_each = sum(layout.stride_bytes for layout in layouts)
    if memory_bytes < one_each:
        raise ConfigError(
            f"kv_memory is {memory_bytes} bytes; one block in each layer group takes {one_each}: "
            "give more memory or a smaller block_size"
        )
    caps = [_most_blocks(layout, max_num_seqs, max_chunk, max_model_len) for layout in layouts]
    if all(cap is not None for cap in caps):  # no full group: the widest windows take what is left
        widest = max(layout.group.window or 0 for layout in layouts)
        caps = [
            None if layout.group.window == widest else cap for layout, cap in zip(layouts, caps, strict=True)
        ]

    def shares(blocks: int) -> list[int]:
        return [blocks if cap is None else min(blocks, cap) for cap in caps]

    def fits(blocks: int) -> bool:
        counts = shares(blocks)
        return sum(n * lay.stride_bytes for n, lay in zip(counts, layouts, strict=True)) <= memory_bytes

    low, high = 1, memory_bytes // min(layout.stride_bytes for layout in layouts) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return shares(low)


def _most_blocks(layout: BlockLayout, max_num_seqs: int, max_chunk: int, max_model_len: int) -> int | None:
    window, size = layout.group.window, layout.block_size
    if window is None:
        return None
    a_sequence = min(-(-(window - 1 + max_chunk) // size) + 1, -(-max_model_len // size))
    return max_num_seqs * a_sequence


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
