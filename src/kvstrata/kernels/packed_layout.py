"""The layout of packed weights (`csrc/linear/format.h`), read by torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

FORMATS: Final = ("int8", "q4_0", "q4_1", "q4_k", "q6_k")
TILE: Final = 16  # outputs
GROUP: Final = 32  # inputs
SUPER: Final = 8  # groups that share d and dmin in q4_k and q6_k
MAGIC: Final = b"KVSLINEA"
VERSION: Final = 1
HEADER_BYTES: Final = 64
_HEADER: Final = struct.Struct("<8siiqq")
_CODE_BYTES: Final = {"int8": 512, "q4_0": 256, "q4_1": 256, "q4_k": 256, "q6_k": 384}
_SCALE_BYTES: Final = {"int8": 32, "q4_0": 32, "q4_1": 64, "q4_k": 32, "q6_k": 32}
_SUPER_BYTES: Final = {"q4_k": 64, "q6_k": 32}
_SHIFT: Final = {"int8": 128, "q4_0": 8, "q4_1": 0, "q4_k": 0, "q6_k": 32}


@dataclass(frozen=True)
class PackedHeader:
    """What a packed weight says of itself: format, `[outputs, inputs]`, and the sizes that follow from them."""

    format: str
    outputs: int
    inputs: int

    @property
    def groups(self) -> int:
        """Groups of 32 inputs, padding included."""
        groups = -(-self.inputs // GROUP)
        return -(-groups // SUPER) * SUPER if self.format in _SUPER_BYTES else groups

    @property
    def tiles(self) -> int:
        """Tiles of 16 outputs."""
        return -(-self.outputs // TILE)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        shared = self.groups // SUPER * _SUPER_BYTES.get(self.format, 0)
        size = self.groups * (_CODE_BYTES[self.format] + _SCALE_BYTES[self.format]) + shared
        return -(-size // 64) * 64

    def to_bytes(self) -> bytes:
        """The header as stored."""
        fields = _HEADER.pack(MAGIC, VERSION, FORMATS.index(self.format), self.outputs, self.inputs)
        return fields.ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class WeightGroups:
    """A packed weight taken apart; `spans` is 2 for q6_k, else 1.

    values: int32 `[outputs, groups, spans, 32 / spans]`, codes less their shift; scale: float32
    `[outputs, groups, spans]`; min: float32 `[outputs, groups]`, None for formats without one.
    """

    values: Tensor
    scale: Tensor
    min: Tensor | None


def open_packed(operator: str, weight: Tensor) -> PackedHeader:
    """Read a packed weight's header. Raises ValueError naming `operator` where it is not a packed weight."""
    if weight.dtype != torch.uint8 or weight.dim() != 1 or not weight.is_contiguous():
        raise ValueError(
            f"{operator}: a packed weight has dtype {weight.dtype} and shape {list(weight.shape)}, "
            "expected contiguous torch.uint8 [bytes] made by pack_weight"
        )
    if len(weight) < HEADER_BYTES:
        raise ValueError(
            f"{operator}: a packed weight has {len(weight)} bytes, expected at least its header of {HEADER_BYTES}"
        )
    magic, version, kind, outputs, inputs = _HEADER.unpack(bytes(weight[: _HEADER.size].tolist()))
    if magic != MAGIC or version != VERSION or not 0 <= kind < len(FORMATS) or outputs <= 0 or inputs <= 0:
        raise ValueError(
            f"{operator}: a weight does not start with the header of a packed weight, "
            "expected one made by pack_weight"
        )
    header = PackedHeader(FORMATS[kind], outputs, inputs)
    expected = HEADER_BYTES + header.tiles * header.tile_bytes
    if len(weight) != expected:
        raise ValueError(
            f"{operator}: a packed weight of [{outputs}, {inputs}] has {len(weight)} bytes, expected {expected}"
        )
    return header


def dequantize_groups(weight: Tensor, header: PackedHeader) -> WeightGroups:
    """Take a packed weight apart into integer values and float scales."""
    kind, groups = header.format, header.groups
    tiles = weight[HEADER_BYTES:].view(header.tiles, header.tile_bytes)
    split = groups * _CODE_BYTES[kind]
    codes = _codes(kind, tiles[:, :split].reshape(header.tiles, groups, -1))
    values = codes.permute(0, 3, 1, 2, 4).reshape(-1, groups, GROUP)[: header.outputs] - _SHIFT[kind]
    scale, least = _scales(kind, tiles[:, split:], groups)
    spans = scale.shape[1] // groups
    scale = scale.permute(0, 2, 1).reshape(-1, groups, spans)[: header.outputs]
    if least is not None:
        least = least.permute(0, 2, 1).reshape(-1, groups)[: header.outputs]
    return WeightGroups(values.reshape(header.outputs, groups, spans, GROUP // spans), scale, least)


def _codes(kind: str, stored: Tensor) -> Tensor:
    """Codes as int32 `[tiles, groups, 8 words, 16 outputs, 4 inputs]`."""
    vectors = stored.view(*stored.shape[:2], -1, TILE, 4).to(torch.int32)
    if kind == "int8":
        return vectors
    packed = vectors[:, :, :4]
    codes = torch.cat((packed & 15, packed >> 4), dim=2)
    if kind == "q6_k":
        fields = torch.arange(4, dtype=torch.int32, device=stored.device).view(4, 1, 1) * 2
        upper = (vectors[:, :, 4:].unsqueeze(3) >> fields) & 3
        codes = codes | upper.flatten(2, 3) << 4
    return codes


def _scales(kind: str, stored: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """Scales `[tiles, groups * spans, 16]` and minima `[tiles, groups, 16]`, float32."""
    tiles = len(stored)
    if kind in _SUPER_BYTES:
        shared_bytes = _SUPER_BYTES[kind]
        supers = stored[:, : groups // SUPER * (shared_bytes + SUPER * 32)].reshape(
            tiles, groups // SUPER, -1
        )
        shared = supers[:, :, :shared_bytes].contiguous().view(torch.float16).float()
        own = supers[:, :, shared_bytes:].reshape(tiles, -1, SUPER, 2, TILE)
        d = shared[:, :, :TILE].view(tiles, -1, 1, 1, TILE)
        if kind == "q6_k":
            return (d * own.contiguous().view(torch.int8).float()).view(tiles, -1, TILE), None
        dmin = shared[:, :, TILE:].view(tiles, -1, 1, TILE)
        scale = d[:, :, :, 0] * own[:, :, :, 0].float()
        return scale.reshape(tiles, -1, TILE), -(dmin * own[:, :, :, 1].float()).reshape(tiles, -1, TILE)
    size = groups * _SCALE_BYTES[kind]
    halves = stored[:, :size].contiguous().view(torch.float16).float().view(tiles, groups, -1, TILE)
    return halves[:, :, 0], halves[:, :, 1] if kind == "q4_1" else None
