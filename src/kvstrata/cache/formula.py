"""The sizing formula with a model's numbers filled in, as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.cache.layout import KVFormat
from kvstrata.cache.shapes import VectorSet
from kvstrata.cache.sizing import CacheSize, KindSize


def sequence_formula(size: CacheSize) -> str:
    """How the bytes of all sequences come about, one term for each kind of layer, with the result."""
    terms = [_term(kind, size) for kind in size.kinds if kind.bytes_per_sequence]
    body = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    return f"{body} x {_plural(size.batch, 'sequence')} = {size.total_bytes:,} bytes"


def _term(kind: KindSize, size: CacheSize) -> str:
    layers = _plural(kind.num_layers, "layer")
    if kind.layer.kind == "linear":
        return f"{layers} x {kind.layer.state_bytes:,} bytes of state"
    tokens = f"{size.length:,} tokens"
    if kind.layer.window is not None:
        tokens = f"min({size.length:,}, {kind.layer.window:,}) tokens"
    return f"{_vectors(kind.layer.vectors, layers, kind.format)} x {tokens}"


def _vectors(vectors: Sequence[VectorSet], layers: str, fmt: KVFormat) -> str:
    if len(vectors) == 2 and vectors[0] == vectors[1]:
        heads = _plural(vectors[0].count, "KV head")
        return f"2 (K and V) x {layers} x {heads} x {_vector(vectors[0].dim, fmt)}"
    if len(vectors) == 1:
        return f"{layers} x {_vector(vectors[0].dim, fmt)}"
    parts = " + ".join(f"{'' if v.count == 1 else f'{v.count} x '}{_vector(v.dim, fmt)}" for v in vectors)
    return f"{layers} x ({parts})"


def _vector(dim: int, fmt: KVFormat) -> str:
    plain = f"{dim} x {fmt.bits / 8:g} byte{'' if fmt.bits == 8 else 's'}"
    scales = fmt.vector_scale_bytes(dim)
    return f"({plain} + {scales} of scales)" if scales else plain


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
