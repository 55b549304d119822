"""Packing weights in plain torch: the specification of `csrc/linear/pack.cpp`, byte for byte.

Block formats are GGML's: their codes and scales are kept as they are. Floats are quantised in groups of 32.
To int8: scale = max |w| / k as the least fp16 no smaller than that, codes = round_half_even(w / scale), k
being the one of 127, 126, ..., 112 whose sum of squared errors, from left to right, is the least, the first
among equals: values on a coarser grid, as those of 4-bit files, can nearly be hit. To 4 bits: min = the
greatest fp16 no larger than the minimum, scale = (max - min) / 15 rounded up as before, codes =
round_half_even((w - min) / scale). A group that holds a value which is not finite, or one too large for such
a scale, gets the scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_shape
from kvstrata.kernels.packed_layout import GROUP, SUPER, TILE, PackedHeader

BLOCKS: Final = {  # inputs and bytes of a block in a file's row
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NATURAL: Final = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_k", "Q6_K": "q6_k"}
_HALF_NAN: Final = 0x7E00


@dataclass(frozen=True)
class Groups:
    """Rows on their way from file to tiles.

    codes: uint8 `[outputs, groups, 32]`; scale, min: uint8 `[outputs, groups or supers, 2]`, fp16 as bytes;
    sub: uint8 `[outputs, groups, 2]`, the small scales of q4_k (scale, min) and q6_k (halves).
    """

    codes: Tensor
    scale: Tensor
    min: Tensor | None = None
    sub: Tensor | None = None


def pack_weight(  # noqa: PLR0917 (the order of the operator's schema)
    data: Tensor, format: str, outputs: int, inputs: int, target: str, row_order: Tensor | None = None
) -> Tensor:
    """Pack a weight's rows for `linear`.

    data: uint8 `[outputs, bytes per row]`; format: what they hold, a key of `BLOCKS`; target: `auto` keeps a
    file's values (Q5_0 as int8, floats quantised to int8), `int8` and `int4` ask for it and fit floats and
    formats that hold it; row_order: int64 `[outputs]`, packed row r is data row `row_order[r]`.
    Returns uint8 `[bytes]`. Raises ValueError naming what does not fit.
    """
    if format not in BLOCKS:
        raise ValueError(f"pack_weight: format is {format}, expected one of {', '.join(BLOCKS)}")
    block_inputs, block_bytes = BLOCKS[format]
    if outputs <= 0 or inputs <= 0 or inputs % block_inputs:
        raise ValueError(
            f"pack_weight: shape is [{outputs}, {inputs}], expected positive sizes, "
            f"inputs a multiple of {block_inputs} for {format}"
        )
    expect_dtype("pack_weight", "data", data, torch.uint8)
    expect_shape("pack_weight", "data", data, (outputs, inputs // block_inputs * block_bytes))
    if row_order is not None:
        expect_dtype("pack_weight", "row_order", row_order, torch.int64)
        expect_shape("pack_weight", "row_order", row_order, (outputs,))
        if not 0 <= int(row_order.min()) <= int(row_order.max()) < outputs:
            raise ValueError(
                f"pack_weight: row_order is {int(row_order.min())} to {int(row_order.max())}, "
                f"expected 0 to {outputs - 1}"
            )
        data = data[row_order]
    packed_format = _target_format(target, format)
    header = PackedHeader(packed_format, outputs, inputs)
    groups = _read(data, format, packed_format, inputs)
    tiles = _tiles(groups, header)
    first = torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8).to(data.device)
    return torch.cat((first, tiles.reshape(-1)))


def _target_format(target: str, source: str) -> str:
    natural = _NATURAL.get(source, "int8")
    wanted = {"auto": natural, "int8": "int8", "int4": "q4_1"}.get(target)
    if wanted is None:
        raise ValueError(f"pack_weight: target is {target}, expected auto, int8 or int4")
    if wanted != natural and source not in FLOATS:
        raise ValueError(
            f"pack_weight: {source} rows cannot be packed as {target}, "
            "expected auto, or rows of F32, F16 or BF16"
        )
    return wanted


def _read(data: Tensor, source: str, target: str, inputs: int) -> Groups:
    outputs = len(data)
    if source in FLOATS:
        values = data.contiguous().view(FLOATS[source]).float()
        padded = torch.nn.functional.pad(values, (0, -inputs % GROUP))
        rest = inputs % GROUP  # padding is no weight: it must not pull a minimum to zero
        last = torch.arange(padded.shape[1], device=data.device) < inputs if rest else None
        groups = padded.view(outputs, -1, GROUP)
        valid = None if last is None else last.view(1, -1, GROUP).expand_as(groups)
        return _quantise_int8(groups) if target == "int8" else _quantise_q4_1(groups, valid)
    blocks = data.reshape(outputs, -1, BLOCKS[source][1])
    if source == "Q8_0":
        return Groups(blocks[:, :, 2:] ^ 0x80, blocks[:, :, :2])
    if source == "Q4_0":
        return Groups(_nibbles(blocks[:, :, 2:]), blocks[:, :, :2])
    if source == "Q4_1":
        return Groups(_nibbles(blocks[:, :, 4:]), blocks[:, :, :2], blocks[:, :, 2:4])
    if source == "Q5_0":
        bits = torch.arange(8, dtype=torch.uint8, device=data.device)
        fifth = (blocks[:, :, 2:6].unsqueeze(-1) >> bits & 1).flatten(2)
        return Groups((_nibbles(blocks[:, :, 6:]) | fifth << 4) + 112, blocks[:, :, :2])
    return _read_q4_k(blocks) if source == "Q4_K" else _read_q6_k(blocks)


def _nibbles(stored: Tensor) -> Tensor:
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _read_q4_k(blocks: Tensor) -> Groups:
    packed = blocks[:, :, 4:16]
    first, second, mixed = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), dim=-1)
    codes = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    codes = torch.cat((codes & 15, codes >> 4), dim=3)
    sub = torch.stack((scales, minima), dim=-1)
    outputs = len(blocks)
    return Groups(
        codes.reshape(outputs, -1, GROUP), blocks[:, :, :2], blocks[:, :, 2:4], sub.reshape(outputs, -1, 2)
    )


def _read_q6_k(blocks: Tensor) -> Groups:
    outputs, supers = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(outputs, supers, 2, 1, 2, 32)
    low = torch.cat((low & 15, low >> 4), dim=3).reshape(outputs, supers, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = blocks[:, :, 128:192].reshape(outputs, supers, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).reshape(outputs, -1, GROUP)
    return Groups(codes, blocks[:, :, 208:210], sub=blocks[:, :, 192:208].reshape(outputs, -1, 2))


def _half_above(x: Tensor) -> Tensor:
    """The least fp16 no smaller than float32 `x >= 0`, as int16 bits."""
    half = x.half()
    return half.view(torch.int16) + (half.float() < x).to(torch.int16)


def _half_below(x: Tensor) -> Tensor:
    """The greatest fp16 no larger than float32 `x`, as int16 bits."""
    half = x.half()
    bits = half.view(torch.int16)
    step = torch.where(bits < 0, 1, -1).to(torch.int16)
    lower = torch.where(bits == 0, torch.tensor(-0x7FFF, dtype=torch.int16, device=x.device), bits + step)
    return torch.where(half.float() > x, lower, bits)


def _bytes(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.uint8).view(*bits.shape, 2)


def _quantise_int8(groups: Tensor) -> Groups:
    bits = _int8_scales(groups)
    usable = groups.isfinite().all(-1) & (bits < 0x7C00) & (bits >= 0)
    bits = torch.where(usable, bits, _HALF_NAN)
    scale = bits.view(torch.float16).float()
    zero = (~usable | (scale == 0)).unsqueeze(-1)
    codes = (groups / torch.where(zero, 1.0, scale.unsqueeze(-1))).round().clamp(-127, 127)
    codes = torch.where(zero, 0.0, codes).to(torch.int16) + 128
    return Groups(codes.to(torch.uint8), _bytes(bits))


def _int8_scales(groups: Tensor) -> Tensor:
    """Bits of the fp16 scale of each group."""
    largest = groups.abs().amax(-1)
    best, least = _tried(groups, largest, 127)
    for top in range(126, 111, -1):
        bits, errors = _tried(groups, largest, top)
        better = errors < least
        best, least = torch.where(better, bits, best), torch.where(better, errors, least)
    return best


def _tried(groups: Tensor, largest: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Bits of the scales that bring each group's largest to the code `top`, and their squared errors."""
    bits = _half_above(largest / float(top))
    scale = bits.view(torch.float16).float()
    errors = torch.zeros_like(largest)
    for value in groups.unbind(-1):
        error = value - (value / scale).round() * scale
        errors = errors + error * error
    return bits, errors


def _quantise_q4_1(groups: Tensor, valid: Tensor | None) -> Groups:
    low = groups if valid is None else torch.where(valid, groups, torch.inf)
    high = groups if valid is None else torch.where(valid, groups, -torch.inf)
    least_bits = _half_below(low.amin(-1))
    least = least_bits.view(torch.float16).float()
    bits = _half_above((high.amax(-1) - least) / 15.0)
    usable = groups.isfinite().all(-1) & (bits < 0x7C00) & (bits >= 0) & least.isfinite()
    bits = torch.where(usable, bits, _HALF_NAN)
    least_bits = torch.where(usable, least_bits, _HALF_NAN)
    scale = bits.view(torch.float16).float()
    zero = (~usable | (scale == 0)).unsqueeze(-1)
    codes = (groups - least.unsqueeze(-1)) / torch.where(zero, 1.0, scale.unsqueeze(-1))
    codes = torch.where(zero, 0.0, codes.round().clamp(0, 15))
    if valid is not None:
        codes = torch.where(valid, codes, 0.0)
    return Groups(codes.to(torch.uint8), _bytes(bits), _bytes(least_bits))


def _in_tiles(rows: Tensor, header: PackedHeader) -> Tensor:
    """`[outputs, n, ...]` as `[tiles, n, 16, ...]`, missing outputs zero."""
    padding = [0, 0] * (rows.dim() - 1) + [0, header.tiles * TILE - header.outputs]
    rows = torch.nn.functional.pad(rows, padding)
    return rows.view(header.tiles, TILE, *rows.shape[1:]).transpose(1, 2)


def _tiles(groups: Groups, header: PackedHeader) -> Tensor:
    """uint8 `[tiles, bytes of a tile]`, laid out as csrc/linear/format.h says."""
    codes = _in_tiles(groups.codes, header)
    words = codes.reshape(header.tiles, header.groups, TILE, 8, 4).transpose(2, 3)
    if header.format != "int8":
        upper = words >> 4
        words = words[:, :, :4] & 15 | words[:, :, 4:] << 4
        if header.format == "q6_k":
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=words.device).view(4, 1, 1)
            fields = upper.view(header.tiles, header.groups, 2, 4, TILE, 4) << shifts
            words = torch.cat((words, fields.sum(3).to(torch.uint8)), dim=2)
    parts = [words.reshape(header.tiles, -1)]
    halves = [part for part in (groups.scale, groups.min) if part is not None]
    shared = torch.cat([_in_tiles(half, header).flatten(2) for half in halves], dim=-1)
    if groups.sub is None:
        parts.append(shared.flatten(1))
    else:
        own = _in_tiles(groups.sub, header).transpose(2, 3).reshape(header.tiles, -1, SUPER * 2 * TILE)
        parts.append(torch.cat((shared, own), dim=-1).flatten(1))
    tiles = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(tiles, (0, header.tile_bytes - tiles.shape[1]))
