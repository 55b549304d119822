"""The operators that take several steps at once, and those of sampling, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_shape
from kvstrata.kernels.kv_formats import expect_pool, head_size
from kvstrata.kernels.reference import gated_activation, rms_norm, rope, write_kv


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place and return `rms_norm(residual, weight, eps)`.

    residual, x: float32 `[..., size]`, residual contiguous; weight: float32 `[size]`.
    """
    expect_dtype("add_rms_norm", "residual", residual, torch.float32)
    expect_dtype("add_rms_norm", "x", x, torch.float32)
    expect_shape("add_rms_norm", "x", x, tuple(residual.shape))
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def fused_gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """`gated_activation` of gates and ups that lie side by side.

    gate_up: float32 `[num_tokens, 2 * intermediate_size]`. Returns float32 `[num_tokens, intermediate_size]`.
    """
    expect_shape("fused_gated_activation", "gate_up", gate_up, ("num_tokens", "2 * intermediate_size"))
    if gate_up.shape[1] % 2:
        raise ValueError(
            f"fused_gated_activation: gate_up has shape {list(gate_up.shape)}, "
            "expected [num_tokens, 2 * intermediate_size]"
        )
    gate, up = gate_up.chunk(2, dim=1)
    return gated_activation(gate, up, kind)


def rope_write_kv(  # noqa: PLR0917 (the order of the operator's schema)
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    kv: Tensor,
    layer: int,
    scales: Tensor | None = None,
    key_offset: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to the pool, return the queries.

    qkv: float32 `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, a row's query heads, then its key
    heads, then its value heads; num_kv_heads and head_dim are kv's. q_norm, k_norm: float32 `[head_dim]`,
    weights of an RMSNorm of each head before RoPE, or None. cos, sin: float32 `[max_position, head_dim / 2]`,
    token i's row being positions[i] (int64 `[num_tokens]`), or i where positions is None. slots, kv, layer
    and scales as in `write_kv`. key_offset: float32 `[num_kv_heads, head_dim]`, taken off every key after
    RoPE: to a softmax over keys it makes no difference. Returns float32 `[num_tokens, num_heads, head_dim]`.
    """
    name = "rope_write_kv"
    expect_dtype(name, "qkv", qkv, torch.float32)
    expect_shape(name, "qkv", qkv, ("num_tokens", "(num_heads + 2 * num_kv_heads) * head_dim"))
    expect_pool(name, kv, scales, layer)
    num_kv_heads, head_dim = kv.shape[3], head_size(kv)
    num_tokens, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    if width % head_dim or num_heads <= 0:
        raise ValueError(
            f"{name}: qkv has shape {list(qkv.shape)}, expected [num_tokens, "
            f"(num_heads + {2 * num_kv_heads}) * {head_dim}] (kv's heads and head_dim)"
        )
    if positions is not None:
        expect_dtype(name, "positions", positions, torch.int64)
        expect_shape(name, "positions", positions, (num_tokens,))
        if num_tokens and (int(positions.min()) < 0 or int(positions.max()) >= len(cos)):
            raise ValueError(
                f"{name}: positions are {int(positions.min())} to {int(positions.max())}, "
                f"expected 0 to {len(cos) - 1} (cos's rows)"
            )
        cos, sin = cos[positions], sin[positions]
    heads = qkv.reshape(num_tokens, -1, head_dim)
    query, key, value = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    key = rope(key, cos, sin)
    if key_offset is not None:
        expect_dtype(name, "key_offset", key_offset, torch.float32)
        expect_shape(name, "key_offset", key_offset, (num_kv_heads, head_dim))
        key = key - key_offset
    write_kv(kv, layer, key, value, slots, scales)
    return rope(query, cos, sin)


def _expect_logits(operator: str, logits: Tensor) -> None:
    expect_dtype(operator, "logits", logits, torch.float32)
    expect_shape(operator, "logits", logits, ("num_rows", "vocab_size"))
    if logits.shape[1] == 0:
        raise ValueError(f"{operator}: logits has shape {list(logits.shape)}, expected at least one token")


def _ordered(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest, falling, the lower id first among equals; NaN counts as -inf."""
    return logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).argsort(dim=1, descending=True, stable=True)[
        :, :k
    ]


def finite_rows(logits: Tensor) -> Tensor:
    """Whether a row has no infinity and no NaN.

    logits: float32 `[num_rows, vocab_size]`. Returns bool `[num_rows]`.
    """
    _expect_logits("finite_rows", logits)
    return logits.isfinite().all(dim=1)


def argmax(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest of equals; NaN never wins.

    logits: float32 `[num_rows, vocab_size]`. Returns int64 `[num_rows]`.
    """
    _expect_logits("argmax", logits)
    known = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    return (known == known.amax(dim=1, keepdim=True)).to(torch.int8).argmax(dim=1)


def logsumexp(logits: Tensor) -> Tensor:
    """`log(sum(exp(logits)))` of each row: what is subtracted from a logit to make it a log-probability.

    logits: float32 `[num_rows, vocab_size]`. Returns float32 `[num_rows]`.
    """
    _expect_logits("logsumexp", logits)
    return logits.logsumexp(dim=1)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k largest logits, falling, the lower id first among equals; NaN counts as -inf.

    logits: float32 `[num_rows, vocab_size]`. Returns float32 and int64 `[num_rows, k]`: logits and ids.
    """
    _expect_logits("top_k", logits)
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"top_k: k is {k}, expected 0 to {logits.shape[1]} (vocab_size)")
    ids = _ordered(logits, k)
    values = logits.gather(1, ids)
    return torch.where(values.isnan(), -torch.inf, values), ids


OPERATORS = (add_rms_norm, fused_gated_activation, rope_write_kv, finite_rows, argmax, logsumexp, top_k)
