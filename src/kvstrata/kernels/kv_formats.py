"""The quantised pool formats in plain torch: the codes and scales, bit for bit, that the native kernels make.

A pool's dtype says its format: int8; float8_e4m3fn; uint8 holds int4, two codes a byte. int8 and fp8 have
one bfloat16 scale for each token and head vector, int4 a float16 scale and a float16 minimum for each 32
channels. Scales are rounded up before codes are made with them, so no value lies further than half a step
from what it is read as.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_layer, expect_shape

INT4_GROUP: Final = 32
MAX_ROTATED: Final = 1024
_SCALE_DTYPES: Final = {
    torch.int8: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
    torch.uint8: torch.float16,
}
_FP16_MAX: Final = 65504.0


def is_quantised(kv: Tensor) -> bool:
    """Whether a pool of this dtype has scales."""
    return kv.dtype in _SCALE_DTYPES


def head_size(kv: Tensor) -> int:
    """Elements of a head vector in the pool `kv`."""
    return kv.shape[5] * 2 if kv.dtype == torch.uint8 else kv.shape[5]


def scales_per_vector(dtype: torch.dtype, head_dim: int) -> int:
    """Scales (minima included) of one vector of `head_dim` elements in a pool of this dtype."""
    if dtype not in _SCALE_DTYPES:
        return 0
    return -(-head_dim // INT4_GROUP) * 2 if dtype == torch.uint8 else 1


def can_rotate(head_dim: int) -> bool:
    """Whether int4 keys of this size can be rotated: a power of two, or that times 12 or 20."""
    return _odd_factor(head_dim) != 0


def expect_pool(operator: str, kv: Tensor, scales: Tensor | None, layer: int) -> None:
    """Raise ValueError unless `kv` is a pool that holds `layer` and `scales` are its scales."""
    expect_layer(operator, kv, layer, *_SCALE_DTYPES)
    quantised = is_quantised(kv)
    if quantised != (scales is not None):
        given, wanted = ("missing", "them") if quantised else ("given", "none")
        raise ValueError(f"{operator}: scales are {given}, expected {wanted} for a pool of {kv.dtype}")
    if scales is None:
        return
    head_dim = head_size(kv)
    if kv.dtype == torch.uint8 and not can_rotate(head_dim):
        raise ValueError(
            f"{operator}: kv has head_dim {head_dim} in int4, expected a power of two, or that times 12 "
            f"or 20, up to {MAX_ROTATED}"
        )
    expect_dtype(operator, "scales", scales, _SCALE_DTYPES[kv.dtype])
    expect_shape(operator, "scales", scales, (*kv.shape[:5], scales_per_vector(kv.dtype, head_dim)))


def rotate(x: Tensor) -> Tensor:
    """Multiply vectors by a Hadamard matrix over its norm: dot products stay, outliers are spread over all.

    x: float32 `[..., head_dim]`, head_dim = 2^k m, m one of 1, 12, 20. Elements (a, b), b < m: butterflies
    over a with distances 1, 2, 4, ...; then for each b the sum over i of sign(b, i) x_i from left to right;
    then all times 1 / sqrt(head_dim). Source: QuaRot, arXiv 2404.00456.
    """
    size = x.shape[-1]
    factor = _odd_factor(size)
    if factor == 0:
        raise ValueError(f"rotate: x has head_dim {size}, expected a power of two, or that times 12 or 20")
    shape, distance = x.shape, factor
    while distance < size:
        low, high = x.reshape(-1, size // (2 * distance), 2, distance).unbind(2)
        x = torch.stack((low + high, low - high), dim=2)
        distance *= 2
    if factor > 1:
        signs = _paley(factor - 1)
        rows = x.reshape(-1, size // factor, factor)
        mixed = signs[:, 0] * rows[..., :1]
        for i in range(1, factor):
            mixed = mixed + signs[:, i] * rows[..., i : i + 1]
        x = mixed
    return x.reshape(shape) * torch.tensor(1.0 / math.sqrt(size), dtype=torch.float32)


def quantise(x: Tensor, dtype: torch.dtype, *, key: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 `[..., head_dim]` vectors, as a pool of this dtype holds them.

    int8: code round(x / scale), scale the largest magnitude / 127; a vector that is not finite is read as
    NaN. fp8: e4m3 of x / scale, scale the largest finite magnitude / 448; infinities become 448 steps, NaN
    stays NaN. int4: keys rotated first; code round((x - minimum) / scale), 0 to 15, for each 32 channels.
    Returns codes `[..., head_dim]` (`[..., head_dim / 2]` for int4) and scales `[..., scales_per_vector]`.
    """
    if dtype == torch.uint8:
        return _quantise_int4(rotate(x) if key else x)
    magnitude = x.abs()
    if dtype == torch.int8:
        largest = magnitude.amax(dim=-1, keepdim=True)
        finite = largest.isfinite()
        scale = torch.where(finite, _bf16_above(largest / 127.0), torch.nan)
        codes = torch.where(finite & (scale != 0), (x / scale).round(), 0.0)
    else:
        largest = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(dim=-1, keepdim=True)
        scale = _bf16_above(largest / 448.0)
        codes = (x / torch.where(scale == 0, 1.0, scale)).clamp(-448.0, 448.0)
    return codes.to(dtype), scale.to(torch.bfloat16)


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes and scales of `quantise` stand for, float32 `[..., head_dim]`; keys of int4 stay rotated."""
    if codes.dtype != torch.uint8:
        return codes.float() * scales.float()
    head_dim = 2 * codes.shape[-1]
    groups = []
    for group, start in enumerate(range(0, head_dim, INT4_GROUP)):
        packed = codes[..., start // 2 : (start + INT4_GROUP) // 2]
        unpacked = torch.cat((packed & 15, packed >> 4), dim=-1).double()
        scale, minimum = scales[..., 2 * group : 2 * group + 2].double().chunk(2, dim=-1)
        groups.append(unpacked * scale + minimum)  # exact in float64: one rounding, as a fused multiply-add
    return torch.cat(groups, dim=-1).float()


def _quantise_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    packed, scales = [], []
    for start in range(0, x.shape[-1], INT4_GROUP):
        group = x[..., start : start + INT4_GROUP]
        low, high = group.aminmax(dim=-1, keepdim=True)
        finite = group.isfinite().all(dim=-1, keepdim=True)
        minimum = _fp16_below(low.clamp(-_FP16_MAX, _FP16_MAX))
        step = _fp16_above(((high - minimum) / 15.0).clamp(max=_FP16_MAX))
        usable = finite & (step != 0)
        codes = ((group - minimum) / step).clamp(0.0, 15.0).round()
        codes = torch.where(usable, codes, 0.0).to(torch.uint8)
        first, second = codes.chunk(2, dim=-1)
        packed.append(first | second << 4)
        scales.append(torch.where(finite, torch.cat((step, minimum), dim=-1), torch.nan))
    return torch.cat(packed, dim=-1), torch.cat(scales, dim=-1).half()


def _bf16_above(x: Tensor) -> Tensor:
    """The least bfloat16 not below each float32 x >= 0, as float32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)


def _fp16_below(x: Tensor) -> Tensor:
    """The greatest float16 not above each x, as float32."""
    near = x.half()
    lower = torch.nextafter(near.float().half(), torch.full_like(near, -torch.inf))
    return torch.where(near.float() > x, lower, near).float()


def _fp16_above(x: Tensor) -> Tensor:
    """The least float16 not below each x, as float32."""
    return -_fp16_below(-x) + 0.0


@cache
def _odd_factor(head_dim: int) -> int:
    """The factor m of head_dim = 2^k m where there is a rotation: 1, 12 or 20; else 0."""
    if not 2 <= head_dim <= MAX_ROTATED:
        return 0
    for factor in (1, 12, 20):
        rest, left = divmod(head_dim, factor)
        if left == 0 and rest & (rest - 1) == 0:
            return factor
    return 0


@cache
def _paley(p: int) -> Tensor:
    """Hadamard matrix of order p + 1, float32: Paley's first construction (J. Math. Phys. 12, 1933)."""
    squares = {root * root % p for root in range(1, p)}
    signs = torch.ones(p + 1, p + 1)
    signs[1:, 0] = -1.0
    for i in range(1, p + 1):
        for j in range(1, p + 1):
            if i != j:
                signs[i, j] = 1.0 if (i - j) % p in squares else -1.0
    return signs
