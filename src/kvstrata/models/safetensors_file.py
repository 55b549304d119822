"""One safetensors file: the header is checked here, so that errors name offsets; the library maps the data.

The format: u64 little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from kvstrata.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of the header. offset: of its data from the file's start."""

    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file: `tensors` from its header, data on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _read_header(path)
        try:
            self._handle: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: at byte 8: not a valid safetensors file: {error}") from error

    def load(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file, in its stored dtype; nothing is read before it is touched."""
        if self._handle is None:
            raise ModelError(f"{self.path}: the file was closed before tensor {name!r} was read")
        try:
            tensor: torch.Tensor = self._handle.get_tensor(name)
        except SafetensorError as error:
            offset = self.tensors[name].offset
            raise ModelError(f"{self.path}: at byte {offset}: tensor {name!r}: {error}") from error
        return tensor

    def close(self) -> None:
        """Drop the mapping; tensors that still view it keep it alive."""
        self._handle = None


def _read_header(path: Path) -> dict[str, SafeTensor]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise _error(path, 0, f"truncated: {size} bytes are no safetensors file")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise _error(
                    path, 0, f"header length is {length}, more than the {size - 8} bytes that follow"
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _error(path, 8 + error.start, "the header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _error(path, 8 + error.pos, f"the header is not JSON: {error.msg}") from None
    except RecursionError:
        raise _error(path, 8, "the header is nested too deep") from None
    if not isinstance(header, dict):
        raise _error(path, 8, "the header is not a JSON object")
    data_start = 8 + length
    return {
        name: _entry(path, name, entry, data_start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> SafeTensor:
    if not isinstance(entry, dict):
        raise _error(path, 8, f"the header's entry of {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _error(path, 8, f"the header's entry of {name!r} lacks a dtype, shape or data_offsets")
    begin, end = offsets
    if data_start + end > size:
        raise _error(
            path,
            data_start + begin,
            f"tensor {name!r} ends at byte {data_start + end}, past the end of the file ({size} bytes): "
            f"truncated or incompletely downloaded",
        )
    elements = 1
    for axis in shape:
        elements *= axis
    if dtype in ITEM_BYTES and elements * ITEM_BYTES[dtype] != end - begin:
        raise _error(
            path, data_start + begin, f"tensor {name!r}: {end - begin} bytes are not {dtype} {shape}"
        )
    return SafeTensor(dtype, tuple(shape), data_start + begin, end - begin)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _error(path: Path, offset: int, what: str) -> ModelError:
    return ModelError(f"{path}: at byte {offset}: {what}")
