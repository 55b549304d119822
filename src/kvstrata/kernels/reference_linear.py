"""Products with packed weights in plain torch: the specification of `csrc/linear`, bit for bit.

The arithmetic. A row of activations is cut into groups of 32 inputs (the last one padded with zeros). In each

    scale = max |x| / 127, codes = round_half_even(x / scale), both in float32;

where the maximum is under 2^-100 scale and codes are zero, where a value is not finite scale is NaN. Weights
are `scale * (code - shift) + min` with a scale for 32 inputs (16 in q6_k). An output starts at zero and
takes, group after group,

    acc = fma(float(dot), w_scale * x_scale, acc)      dot: the exact integer sum over the scale's inputs
    acc = fma(w_min, x_scale * float(sum of x codes), acc)      formats with a minimum only

in float32, each fma rounded once. So a row's bits depend on that row and the weights alone. The layout of a
packed weight is described in `csrc/linear/format.h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_shape
from kvstrata.kernels.packed_layout import GROUP, PackedHeader, dequantize_groups, open_packed

LINEAR_SCHEMAS: Final = (
    "linear(Tensor x, Tensor[] weights, Tensor? bias=None) -> Tensor",
    "packed_embedding(Tensor ids, Tensor weight) -> Tensor",
    "pack_weight(Tensor data, str format, int outputs, int inputs, str target, Tensor? row_order=None) -> Tensor",
)
SMALLEST: Final = 2.0**-100  # below this a group counts as zero, so that no scale is subnormal


@dataclass(frozen=True)
class QuantizedRows:
    """Activations as a product uses them.

    codes: int32 `[num_tokens, num_groups, 32]`, -127 to 127; scale: float32 `[num_tokens, num_groups]`.
    """

    codes: Tensor
    scale: Tensor


def quantize_rows(x: Tensor, num_groups: int) -> QuantizedRows:
    """Quantise float32 `[num_tokens, in_features]` in groups of 32, padded with zeros to `num_groups`."""
    padded = torch.nn.functional.pad(x, (0, num_groups * GROUP - x.shape[1]))
    groups = padded.view(x.shape[0], num_groups, GROUP)
    largest = groups.abs().amax(-1)
    finite = groups.isfinite().all(-1)
    usable = finite & (largest >= SMALLEST)
    scale = torch.where(usable, largest / 127.0, 0.0)
    divisor = torch.where(usable, scale, 1.0)
    codes = torch.where(usable.unsqueeze(-1), (groups / divisor.unsqueeze(-1)).round(), 0.0).to(torch.int32)
    return QuantizedRows(codes, torch.where(finite, scale, torch.nan))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of float32 tensors, rounded once.

    The product of two float32 is exact in float64. Its sum with `c` may not be, and rounding it twice could
    differ from rounding once; so it is rounded to odd first (Boldo and Melquiond, IEEE Trans. Computers 57(4),
    2008): where the float64 sum is inexact, its last bit is set towards the exact value.
    """
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    other = total - product
    error = (product - (total - other)) + (addend - other)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)
    nudge = (error != 0) & total.isfinite() & ((bits & 1) == 0)
    bits = torch.where(nudge, torch.where(away, bits + 1, bits - 1), bits)
    return bits.view(torch.float64).float()


def linear(x: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """Multiply rows by packed weights, the outputs of all weights end to end.

    x: float32 `[num_tokens, in_features]`; weights: uint8 `[bytes]` each, made by `pack_weight` and all of
    in_features inputs; bias: float32 `[sum of out_features]`, added last.
    Returns float32 `[num_tokens, sum of out_features]`. A group of a row that holds a value that is not
    finite makes the row's outputs NaN. Raises ValueError where shapes or dtypes do not fit together.
    """
    expect_dtype("linear", "x", x, torch.float32)
    expect_shape("linear", "x", x, ("num_tokens", "in_features"))
    if not weights:
        raise ValueError("linear: weights has 0 entries, expected at least 1")
    headers = [open_packed("linear", weight) for weight in weights]
    for header in headers:
        expect_shape("linear", "x", x, ("num_tokens", header.inputs))
    total = sum(header.outputs for header in headers)
    if bias is not None:
        expect_dtype("linear", "bias", bias, torch.float32)
        expect_shape("linear", "bias", bias, (total,))
    out = torch.cat(
        [_multiply(x, weight, header) for weight, header in zip(weights, headers, strict=True)], 1
    )
    return out if bias is None else out + bias


def _multiply(x: Tensor, weight: Tensor, header: PackedHeader) -> Tensor:
    groups = dequantize_groups(weight, header)
    rows = quantize_rows(x, header.groups)
    spans = groups.scale.shape[2]
    codes = rows.codes.view(len(x), header.groups, spans, GROUP // spans)
    out = torch.zeros((len(x), header.outputs), dtype=torch.float32, device=x.device)
    for group in range(header.groups):
        x_scale = rows.scale[:, group, None]
        for span in range(spans):
            # Sums of integers below 2^24 are exact in float64, which has a matrix product.
            dot = codes[:, group, span].double() @ groups.values[:, group, span].double().T
            out = fma(dot.float(), x_scale * groups.scale[:, group, span], out)
        if groups.min is not None:
            total = codes[:, group].sum((-1, -2), dtype=torch.int32).float().unsqueeze(-1)
            out = fma(groups.min[:, group], x_scale * total, out)
    return out


def packed_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a packed weight as floats.

    ids: int64 `[num_tokens]`; weight: uint8 `[bytes]`, made by `pack_weight`. Returns float32
    `[num_tokens, in_features]`, rounded once as the file's format defines it. Raises ValueError where an id
    is outside the weight's outputs.
    """
    expect_dtype("packed_embedding", "ids", ids, torch.int64)
    expect_shape("packed_embedding", "ids", ids, ("num_tokens",))
    header = open_packed("packed_embedding", weight)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < header.outputs:
        raise ValueError(
            f"packed_embedding: ids are {int(ids.min())} to {int(ids.max())}, expected 0 to {header.outputs - 1}"
        )
    groups = dequantize_groups(weight, header)
    rows = groups.values[ids].float() * groups.scale[ids].unsqueeze(-1)
    if groups.min is not None:
        rows = rows + groups.min[ids, :, None, None]
    return rows.view(len(ids), header.groups * GROUP)[:, : header.inputs].contiguous()
