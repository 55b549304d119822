"""The operators in plain torch: their specification, and what runs where no native kernel is.

All compute in float32 on whatever device their inputs lie. Every operator raises ValueError naming the
argument, what it was and what would be right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_shape
from kvstrata.kernels.kv_formats import expect_pool, head_size, quantise
from kvstrata.kernels.reference_attention import AttentionPlan

VERSION = 2  # raised whenever a change here may change bits
ACTIVATIONS = ("silu", "gelu_tanh")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale vectors to unit root mean square, then by `weight` (Zhang and Sennrich, arXiv 1910.07467).

    x: float32 `[..., size]`; weight: float32 `[size]`. Returns float32 `[..., size]`.
    """
    expect_dtype("rms_norm", "x", x, torch.float32)
    expect_dtype("rms_norm", "weight", weight, torch.float32)
    expect_shape("rms_norm", "weight", weight, (x.shape[-1],))
    return F.rms_norm(x, weight.shape, weight, eps)


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`activation(gate) * up` of a gated MLP (Shazeer, arXiv 2002.05202).

    gate, up: float32 `[num_tokens, intermediate_size]`; kind: `silu` or `gelu_tanh` (the tanh approximation).
    Returns float32 of the same shape.
    """
    expect_dtype("gated_activation", "gate", gate, torch.float32)
    expect_dtype("gated_activation", "up", up, torch.float32)
    expect_shape("gated_activation", "up", up, tuple(gate.shape))
    if kind == "silu":
        return F.silu(gate).mul_(up)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    raise ValueError(f"gated_activation: kind is {kind!r}, expected one of {', '.join(ACTIVATIONS)}")


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of a head by its token's angles (Su et al., arXiv 2104.09864).

    x: float32 `[num_tokens, num_heads, head_dim]`; cos, sin: float32 `[num_tokens, head_dim / 2]`.
    Returns float32 `[num_tokens, num_heads, head_dim]`, contiguous.
    """
    expect_dtype("rope", "x", x, torch.float32)
    expect_dtype("rope", "cos", cos, torch.float32)
    expect_dtype("rope", "sin", sin, torch.float32)
    expect_shape("rope", "x", x, ("num_tokens", "num_heads", "head_dim"))
    num_tokens, _, head_dim = x.shape
    if head_dim % 2:
        raise ValueError(f"rope: x has head_dim {head_dim}, expected an even one")
    half = head_dim // 2
    expect_shape("rope", "cos", cos, (num_tokens, half))
    expect_shape("rope", "sin", sin, (num_tokens, half))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def write_kv(  # noqa: PLR0917 (the order of the operator's schema)
    kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Write tokens' keys and values into the pool, in the pool's format.

    kv: `[num_blocks, group_layers, 2, num_kv_heads, block_size, head_dim]`, any floating dtype, int8, or
    uint8 with two int4 a byte, changed in place; layer: index in the group. scales: of a quantised pool (see
    `kv_formats`), `[num_blocks, group_layers, 2, num_kv_heads, block_size, scales_per_vector]`, changed too;
    for the native kernels they lie in kv's blocks.
    key, value: float32 `[num_tokens, num_kv_heads, head_dim]`. slots: int64 `[num_tokens]`, block *
    block_size + offset, distinct; one outside the pool is an error.
    """
    expect_pool("write_kv", kv, scales, layer)
    num_blocks, _, _, num_kv_heads, block_size, _ = kv.shape
    head_dim = head_size(kv)
    num_tokens = key.shape[0]
    for name, tensor in (("key", key), ("value", value)):
        expect_dtype("write_kv", name, tensor, torch.float32)
        expect_shape("write_kv", name, tensor, (num_tokens, num_kv_heads, head_dim))
    expect_dtype("write_kv", "slots", slots, torch.int64)
    expect_shape("write_kv", "slots", slots, (num_tokens,))
    if num_tokens == 0:
        return
    # A negative index would silently wrap around to another sequence's block.
    low, high = torch.aminmax(slots)
    if low < 0 or high >= num_blocks * block_size:
        raise ValueError(
            f"write_kv: slots are {int(low)} to {int(high)}, expected 0 to {num_blocks * block_size - 1}"
        )
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    if scales is None:
        kv.select(1, layer)[blocks, :, :, offsets] = torch.stack((key, value), dim=1).to(kv.dtype)
        return
    for part, x in enumerate((key, value)):
        codes, steps = quantise(x, kv.dtype, key=part == 0)
        kv.select(1, layer)[:, part].view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
        scales.select(1, layer)[:, part][blocks, :, offsets] = steps


def paged_attention(  # noqa: PLR0917 (the order of the operator's schema)
    query: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    scales: Tensor | None = None,
    windows: Tensor | None = None,
    sinks: Tensor | None = None,
    sink_query: Tensor | None = None,
    key_offset: Tensor | None = None,
) -> Tensor:
    """Causal attention of many sequences that reads keys and values from the pool only.

    query: float32 `[num_tokens, num_heads, head_dim]`, after RoPE, sequences end to end; num_heads is a
    multiple of num_kv_heads, and query head h reads KV head `h // (num_heads / num_kv_heads)`.
    kv: `[num_blocks, group_layers, 2, num_kv_heads, block_size, head_dim]`, and scales, as in `write_kv`;
    layer: index in the group. block_tables: int32 `[num_seqs, max_blocks]`; entries of blocks in which no
    query sees a token are never read and may be -1. query_starts: int32 `[num_seqs + 1]`; context_lens: int32
    `[num_seqs]`: sequence s's queries are its last `query_starts[s + 1] - query_starts[s]` (maybe none) of
    `context_lens[s]` tokens. scale multiplies the dot products; a query sees itself and the
    `window - 1` tokens before it, or all before it where window is 0. windows: int32 `[num_seqs]`, a window
    for each sequence in the place of `window`. sinks: int32 `[num_seqs]`, how many of a sequence's first
    tokens its queries see besides; 0 where there is no window. From position sinks + window on, where
    something is hidden, a query meets the sinks as its row of sink_query, float32 as query, which is
    rotated to position sinks + window - 1 (StreamingLLM, arXiv 2309.17453). key_offset: as `rope_write_kv`
    took it off the keys; it matters where a row meets keys by two queries.
    Slots beyond a sequence's tokens may hold anything, NaN included. Returns float32
    `[num_tokens, num_heads, head_dim]`.
    """
    plan = AttentionPlan.build(kv, block_tables, query_starts, context_lens, window, scales, windows, sinks)
    return plan.attend(query, kv, layer, scale, sink_query, key_offset=key_offset)


OPERATORS = (rms_norm, gated_activation, rope, write_kv, paged_attention)
