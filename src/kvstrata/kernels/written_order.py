"""The one order of every float reduction, bit for bit: what the native kernels are held to in tests.

`reference` says what an operator computes; this module says in which order the native kernels do it, whatever
the instruction set, batch, chunk and number of threads. It is far too slow for anything but tests.

Rules. A float32 result of +, -, *, / and sqrt is rounded once; `fma` is fused. A sum of vectors is 16
interleaved lanes (lane l takes elements l, 16 + l, ...) combined by `tree`; missing elements are +0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LANES = 16
TILE = 64  # tokens; tile t holds positions [64 t, 64 t + 64)
LOGITS_CHUNK = 1024


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 `a * b + c`, rounded once.

    The product is exact in float64; the sum is rounded there to odd, so that rounding it again to float32 is
    right (Boldo and Melquiond, Emulation of FMA, IEEE Transactions on Computers 57(4), 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    odd = (total.contiguous().view(torch.int64) & 1).bool()
    toward = torch.where(error > 0, math.inf, -math.inf).to(torch.float64)
    sticky = (error != 0) & ~odd & total.isfinite()
    return torch.where(sticky, torch.nextafter(total, toward), total).float()


def tree(lanes: Tensor) -> Tensor:
    """Sum over the last axis of 16: (l, l + 8), (l, l + 4), (l, l + 2), (l, l + 1)."""
    for step in (8, 4, 2, 1):
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
    return lanes[..., 0]


def exp(x: Tensor) -> Tensor:
    """e^x as the kernels compute it: 0 below -87, e^88 above 88, within 3 ulp between.

    Cody-Waite reduction by ln 2 in two parts, then a polynomial of degree 6.
    """
    one = torch.ones_like(x)
    rounder = 12582912.0 * one  # 1.5 * 2^23
    bounded = x.clamp(-87.0, 88.0)
    n = fma(bounded, 1.44269504088896341 * one, rounder) - rounder
    r = fma(n, -0.693145751953125 * one, bounded)
    r = fma(n, -1.42860682030941723212e-6 * one, r)
    p = 1.3888889e-3 * one
    for coefficient in (8.3333333e-3, 4.1666668e-2, 1.6666667e-1, 0.5, 1.0, 1.0):
        p = fma(p, r, coefficient * one)
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)  # 2^n
    return torch.where(x < -87.0, 0.0, p * power)


def _lanes(x: Tensor) -> Tensor:
    """`[..., size]` as `[..., steps, 16]`, padded with +0."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // LANES, LANES)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot products over the last axis: a lane's first term is a product, the rest are fused."""
    left, right = _lanes(a), _lanes(b)
    lanes = left[..., 0, :] * right[..., 0, :]
    for step in range(1, left.shape[-2]):
        lanes = fma(left[..., step, :], right[..., step, :], lanes)
    return tree(lanes)


def _pair_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Pairs on the last axis of a and b: fused onto c the odd one first, then the even one."""
    return fma(a[..., 0], b[..., 0], fma(a[..., 1], b[..., 1], c))


def paired_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot products over the last axis: lane l takes pairs (2l, 2l + 1), (32 + 2l, 33 + 2l), ... from +0."""
    padding = (0, -a.shape[-1] % (2 * LANES))
    padded = (torch.nn.functional.pad(x, padding) for x in (a, b))
    left, right = (x.reshape(*x.shape[:-1], -1, LANES, 2) for x in padded)
    lanes = torch.zeros_like(left[..., 0, :, 0] * right[..., 0, :, 0])
    for step in range(left.shape[-3]):
        lanes = _pair_fma(left[..., step, :, :], right[..., step, :, :], lanes)
    return tree(lanes)


def lane_sum(x: Tensor) -> Tensor:
    """Sum over the last axis, lanes folded from +0."""
    steps = _lanes(x)
    lanes = torch.zeros_like(steps[..., 0, :])
    for step in range(steps.shape[-2]):
        lanes = lanes + steps[..., step, :]
    return tree(lanes)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Squares folded from +0 by fused multiply-adds; `(x * inverse) * weight`."""
    steps = _lanes(x)
    lanes = torch.zeros_like(steps[..., 0, :])
    for step in range(steps.shape[-2]):
        lanes = fma(steps[..., step, :], steps[..., step, :], lanes)
    mean = tree(lanes) / torch.tensor(float(x.shape[-1]))
    # torch's float32 square root is not always rounded right; through float64 it is.
    root = (mean + torch.tensor(eps, dtype=torch.float32)).double().sqrt().float()
    inverse = 1.0 / root
    return x * inverse.unsqueeze(-1) * weight


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`gate / (1 + exp(-u)) * up`; u is the gate; for gelu_tanh 2 sqrt(2 / pi) (gate + 0.044715 gate^3)."""
    exponent = 0.0 - gate
    if kind == "gelu_tanh":
        one = torch.ones_like(gate)
        cubic = fma(gate * gate, 0.044715 * one, one)
        exponent = torch.tensor(-1.5957691216057308) * (gate * cubic)
    return gate / (1.0 + exp(exponent)) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each half is one fused multiply-add onto a rounded product."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1).expand_as(first), sin.unsqueeze(1).expand_as(first)
    return torch.cat((fma(first, cos, 0.0 - second * sin), fma(second, cos, first * sin)), dim=-1)


def logsumexp(logits: Tensor) -> Tensor:
    """Chunks of 1,024 logits by `lane_sum`, folded left to right in float64, where the logarithm is taken."""
    largest = logits.amax(dim=1)
    total = torch.zeros(len(logits), dtype=torch.float64)
    for start in range(0, logits.shape[1], LOGITS_CHUNK):
        chunk = logits[:, start : start + LOGITS_CHUNK]
        total = total + lane_sum(exp(chunk - largest.unsqueeze(1))).double()
    return (largest.double() + natural_log(total)).float()


def natural_log(x: Tensor) -> Tensor:
    """float64 ln x, x >= 1: x = 2^n f, ln f = 2 artanh((f - 1) / (f + 1)) by its series up to s^19."""
    mantissa, exponent = torch.frexp(x)  # in [1/2, 1)
    low = mantissa * 2.0 <= 1.4142135623730951
    f = torch.where(low, mantissa * 2.0, mantissa)
    n = torch.where(low, exponent - 1, exponent).double()
    s = (f - 1.0) / (f + 1.0)
    z = s * s
    series = torch.full_like(x, 1.0 / 19.0)
    for k in range(17, 0, -2):
        series = series * z + 1.0 / k
    return n * 0.69314718055994530942 + 2.0 * s * series


def attention(  # noqa: PLR0917
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    first: int,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: int = 0,
    sink_query: Tensor | None = None,
) -> Tensor:
    """One query row of some heads over the positions `first` to the last of its KV head.

    query: `[num_heads, head_dim]`; keys, values: `[num_tokens, head_dim]` from position 0 on, as the pool
    holds them. In each tile: m the largest score, p = exp(score - m), l their `lane_sum` with hidden ones as
    +0, o the values folded from +0 in order by fused multiply-adds. The state (M, L, O), first (-inf, 0, 0),
    takes a tile by M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = fma(l, b, L * a) and
    O = fma(o, b, O * a).
    int8 and fp8: keys and values are codes (fp8 / 256), the scales float32 `[num_tokens]` theirs (fp8 * 256);
    a score is (dot * key scale) * scale, and p, once l is summed, is multiplied by its value's scale. int4:
    keys and values are fma(code, scale, minimum), and the query is rotated as the keys were.
    bf16: the query and each p, before it is summed, are rounded to bf16; a score is a `paired_dot`; o is
    folded over the pairs of positions (2j, 2j + 1), the odd one first, what is not seen being +0 times +0. In
    all of it denormals are zeros and are flushed to zeros.
    sinks: where `first` is after so many positions, these are seen besides, by `sink_query`; the tiles
    between are passed over, and in a tile the order of positions is the same.
    Returns O / L, `[num_heads, head_dim]`.
    """
    paired = keys.dtype == torch.bfloat16
    product = paired_dot if paired else dot
    if paired:
        query = query.bfloat16().float()
        sink_query = None if sink_query is None else sink_query.bfloat16().float()
    num_heads, head_dim = query.shape
    largest = torch.full((num_heads,), -math.inf)
    total = torch.zeros(num_heads)
    out = torch.zeros(num_heads, head_dim)
    keys, values = keys.float(), values.float()
    positions = torch.tensor([*range(min(sinks, first)), *range(first, len(keys))])
    with _flushing_denormals(paired):
        for start in range(0, len(keys), TILE):
            seen = positions[(positions >= start) & (positions < start + TILE)]
            if not len(seen):
                continue
            scores = product(query.unsqueeze(1), keys[seen].unsqueeze(0))
            if sink_query is not None:
                others = product(sink_query.unsqueeze(1), keys[seen].unsqueeze(0))
                scores = torch.where(seen < min(sinks, first), others, scores)
            if key_scales is not None:
                scores = scores * key_scales[seen]
            scores = scores * torch.tensor(scale, dtype=torch.float32)
            m = scores.amax(dim=1)
            p = exp(scores - m.unsqueeze(1))
            if paired:
                p = p.bfloat16().float()
            sums = lane_sum(torch.zeros(num_heads, TILE).index_copy(1, seen - start, p))
            if value_scales is not None:
                p = p * value_scales[seen]
            tile = _weigh(p, values[seen], (seen - start).tolist(), paired)
            top = torch.maximum(largest, m)
            a, b = exp(largest - top), exp(m - top)
            total = fma(sums, b, total * a)
            out = fma(tile, b.unsqueeze(1), out * a.unsqueeze(1))
            largest = top
        return out / total.unsqueeze(1)


def _weigh(weights: Tensor, values: Tensor, places: list[int], paired: bool) -> Tensor:
    """Values folded in order, or pairs of them (2j, 2j + 1) of a tile; places: of `values` in the tile."""
    sums = torch.zeros(len(weights), values.shape[1])
    if not paired:
        for j in range(len(places)):
            sums = fma(weights[:, j : j + 1], values[j], sums)
        return sums
    all_weights, all_values = torch.zeros(len(weights), TILE), torch.zeros(TILE, values.shape[1])
    all_weights[:, places], all_values[places] = weights, values
    for even in sorted({place // 2 * 2 for place in places}):
        pair = slice(even, even + 2)
        sums = _pair_fma(all_weights[:, None, pair], all_values[pair].T, sums)
    return sums


@contextmanager
def _flushing_denormals(wanted: bool) -> Iterator[None]:
    """Take denormals for zeros and make none, as the processor can."""
    if wanted:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if wanted:
            torch.set_flush_denormal(False)
