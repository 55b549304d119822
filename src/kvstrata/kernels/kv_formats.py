"""The quantised pool formats in plain torch: the codes and scales, bit for bit, that the native kernels make.

A pool's dtype says its format: int8; float8_e4m3fn; uint8 holds int4, two codes a byte. int8 and fp8 have
one bfloat16 scale for each token and head vector, int4 a scale and a zero of a byte each for each 16
channels. Codes are made with the scale as it is stored, which is large enough for all values: none lies
further than half a step from what it is read as.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_layer, expect_shape

INT4_GROUP: Final = 32  # channels whose codes lie together, the first half in low nibbles
INT4_SCALED: Final = 16  # channels that share a scale and a zero
MAX_ROTATED: Final = 1024
_SCALE_DTYPES: Final = {
    torch.int8: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
    torch.uint8: torch.uint8,
}
# The scales of int4: five bits of exponent, biased by 19, and three of mantissa; 1 to 7 are not used.
_LEAST_SCALE: Final = 8
_LARGEST_SCALE: Final = 254
_NAN_SCALE: Final = 255
_REBIAS: Final = (127 - 19) << 3


def is_quantised(kv: Tensor) -> bool:
    """Whether a pool of this dtype has scales."""
    return kv.dtype in _SCALE_DTYPES


def head_size(kv: Tensor) -> int:
    """Elements of a head vector in the pool `kv`."""
    return kv.shape[5] * 2 if kv.dtype == torch.uint8 else kv.shape[5]


def scales_per_vector(dtype: torch.dtype, head_dim: int) -> int:
    """Scales (zeros included) of one vector of `head_dim` elements in a pool of this dtype."""
    if dtype not in _SCALE_DTYPES:
        return 0
    return -(-head_dim // INT4_SCALED) * 2 if dtype == torch.uint8 else 1


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
    stays NaN. int4: keys rotated first; code round(x / scale) - zero, 0 to 15, with the least scale that
    has a code for each of 16 channels.
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
    unpacked = []
    for start in range(0, head_dim, INT4_GROUP):
        packed = codes[..., start // 2 : (start + INT4_GROUP) // 2]
        unpacked += [packed & 15, packed >> 4]
    steps, zeros = _int4_scales(scales)
    each = [x.repeat_interleave(INT4_SCALED, dim=-1)[..., :head_dim] for x in (steps, zeros)]
    return (torch.cat(unpacked, dim=-1).float() + each[1]) * each[0]  # exact: the sum has 9 bits, a scale 4


def int4_steps(scales: Tensor) -> Tensor:
    """The size of a step for each 16 channels, from the scales of an int4 pool; float32."""
    return _int4_scales(scales)[0]


def _int4_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros of an int4 pool as float32."""
    code, zero = scales.int().reshape(*scales.shape[:-1], -1, 2).unbind(-1)
    step = torch.where(code == _NAN_SCALE, torch.nan, _scale_of(code))
    return torch.where(code == 0, 0.0, step), torch.where(zero > 127, zero - 256, zero).float()


def _quantise_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = [], []
    for start in range(0, x.shape[-1], INT4_SCALED):
        group = x[..., start : start + INT4_SCALED]
        low, high = group.aminmax(dim=-1, keepdim=True)
        finite = group.isfinite().all(dim=-1, keepdim=True)
        low, high = (torch.where(finite, end, 0.0) for end in (low, high))
        largest = torch.maximum(low.abs(), high.abs())
        code = _scale_above(torch.maximum(largest / 127.0, high * 0.0625 - low * 0.0625))
        while True:
            step = _scale_of(code)
            short = (_steps(high, step) - _steps(low, step) > 15) & (code < _LARGEST_SCALE)
            if not short.any():
                break
            code = code + short
        zero = _steps(low, step).clamp(-128, 127)
        codes.append(torch.where(finite, (_steps(group, step) - zero).clamp(0, 15), 0).to(torch.uint8))
        code, zero = torch.where(finite, code, _NAN_SCALE), torch.where(finite, zero, 0)
        scales += [code.to(torch.uint8), zero.to(torch.int8).view(torch.uint8)]
    wide, packed = torch.cat(codes, dim=-1), []
    for start in range(0, x.shape[-1], INT4_GROUP):
        first, second = wide[..., start : start + INT4_GROUP].chunk(2, dim=-1)
        packed.append(first | second << 4)
    return torch.cat(packed, dim=-1), torch.cat(scales, dim=-1)


def _steps(x: Tensor, step: Tensor) -> Tensor:
    """x in whole steps, int32."""
    return (x / step).clamp(-1024.0, 1024.0).nan_to_num(0.0).round().int()


def _scale_above(x: Tensor) -> Tensor:
    """The least code, int32, whose scale is not below each float32 x >= 0."""
    bits = x.contiguous().view(torch.int32).long()
    return ((bits + 0xFFFFF >> 20) - _REBIAS).clamp(_LEAST_SCALE, _LARGEST_SCALE).int()


def _scale_of(code: Tensor) -> Tensor:
    """The float32 scale of each int32 code."""
    return (code + _REBIAS << 20).view(torch.float32)


def _bf16_above(x: Tensor) -> Tensor:
    """The least bfloat16 not below each float32 x >= 0, as float32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)


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
