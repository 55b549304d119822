"""A GGUF file, memory-mapped: header and tensor table are read, tensor data stays in the file.

The format is little endian, versions 2 and 3: magic, version, counts, metadata pairs, tensor table, then the
tensor data, each tensor at a multiple of the alignment. Every count and length is checked against the
bytes that are left before anything is allocated, so a damaged file gives an error that names the offset.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvstrata.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535  # of a key or a tensor's name
MAX_NESTING = 4  # of arrays in arrays; the format sets no limit, a hostile file would exhaust the stack

# Smallest encodings, to bound the counts in a header by the bytes that follow it.
MIN_PAIR_BYTES = 8 + 4 + 1  # empty key, type, one-byte value
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, one dimension

STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. shape: PyTorch order, the last axis contiguous. offset: from the file's start."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Product of all axes but the last."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count


class GGUFFile:
    """An open file: `metadata`, `tensors` and views of the data.

    metadata: scalars as int, float, bool or str; string arrays as list[str]; number arrays as numpy arrays.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        version: int,
        metadata: dict[str, Any],
        tensors: dict[str, GGUFTensor],
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self._mapping = mapping
        self._bytes: np.ndarray | None = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map a file and read its header. Raises ModelError naming file and offset."""
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size == 0:
                    raise ModelError(f"{path}: the file is empty (0 bytes), a GGUF file was expected")
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            version, metadata, tensors = _Header(path, mapping).read()
        except ModelError:
            mapping.close()
            raise
        return cls(path, mapping, version, metadata, tensors)

    def data(self, name: str) -> np.ndarray:
        """A tensor's bytes in the mapping, uint8 `[rows, bytes per row]`, read-only."""
        if self._bytes is None:
            raise ModelError(f"{self.path}: the file was closed before tensor {name!r} was read")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: has no tensor {name!r}")
        data = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        return data.reshape(tensor.rows, -1)

    def close(self) -> None:
        """Drop the mapping; memory that tensors still view is freed with the last of them."""
        self._bytes = None
        try:
            self._mapping.close()
        except BufferError:
            return  # a view is still alive and keeps the mapping; it goes with the view


class _Header:
    """A cursor over the header; `position` is what errors report."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.size = len(mapping)
        self.position = 0

    def read(self) -> tuple[int, dict[str, Any], dict[str, GGUFTensor]]:
        """Version, metadata and tensor table."""
        magic = self.mapping[:4]
        if magic != MAGIC:
            raise self.error(0, f"not a GGUF file: magic is {magic!r}, expected {MAGIC!r}")
        self.position = 4
        version = self.number("<I", "version")
        if version not in VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0]
            what = "a big-endian file" if swapped in VERSIONS else f"version {version}"
            raise self.error(4, f"{what} is not supported: little-endian GGUF 2 or 3 is")
        tensor_count = self.count("tensor count", MIN_TENSOR_BYTES)
        pair_count = self.count("metadata count", MIN_PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            start = self.position
            key = self.name("metadata key")
            if key in metadata:
                raise self.error(start, f"duplicate metadata key {key!r}")
            metadata[key] = self.value(self.number("<I", f"type of {key}"), key, 0)
        return version, metadata, self.tensor_table(tensor_count, self.alignment(metadata))

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(self.position, f"general.alignment is {alignment!r}, expected a power of two")
        return alignment

    def tensor_table(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        entries: list[tuple[int, str, str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            start = self.position
            name = self.name("tensor name")
            entries.append((start, name, *self.tensor_entry(start, name, alignment)))
        base = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for start, name, kind, shape, offset, nbytes in entries:
            if name in tensors:
                raise self.error(start, f"duplicate tensor {name!r}")
            if base + offset + nbytes > self.size:
                raise self.error(
                    base + offset,
                    f"tensor {name!r} ends at byte {base + offset + nbytes}, past the end of the file "
                    f"({self.size} bytes): truncated or incompletely downloaded",
                )
            tensors[name] = GGUFTensor(name, kind, shape, base + offset, nbytes)
        return tensors

    def tensor_entry(self, start: int, name: str, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
        """(format, shape, offset from the data's start, bytes) of the table's entry at the cursor."""
        dimensions = self.number("<I", f"dimensions of {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.error(start, f"tensor {name!r} has {dimensions} dimensions, expected 1 to 4")
        sizes = [self.number("<Q", f"shape of {name}") for _ in range(dimensions)]
        type_id = self.number("<I", f"type of {name}")
        offset = self.number("<Q", f"offset of {name}")
        try:
            kind = GGMLQuantizationType(type_id)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.error(start, f"tensor {name!r} has unknown ggml type {type_id}") from None
        shape = tuple(reversed(sizes))
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0 or shape[-1] % block_elements:
            raise self.error(
                start, f"tensor {name!r}: shape {shape} is not whole {kind.name} blocks of {block_elements}"
            )
        if offset % alignment:
            raise self.error(start, f"tensor {name!r} lies at {offset}, not a multiple of {alignment}")
        return kind.name, shape, offset, elements // block_elements * block_bytes

    def error(self, offset: int, what: str) -> ModelError:
        return ModelError(f"{self.path}: at byte {offset}: {what}")

    def number(self, code: str, what: str) -> int:
        try:
            (value,) = struct.unpack_from(code, self.mapping, self.position)
        except (struct.error, OverflowError, IndexError):
            raise self.error(
                self.position, f"the file ends inside its header ({what}): truncated at {self.size} bytes"
            ) from None
        self.position += struct.calcsize(code)
        return int(value)

    def count(self, what: str, least_bytes: int) -> int:
        """A u64 count of things that take at least `least_bytes` each, of which so many can follow."""
        start = self.position
        count = self.number("<Q", what)
        left = self.size - self.position
        if count * least_bytes > left:
            raise self.error(start, f"{what} is {count}, more than the {left} bytes that follow can hold")
        return count

    def name(self, what: str) -> str:
        start = self.position
        text = self.string(what)
        if self.position - start - 8 > MAX_NAME_BYTES:
            raise self.error(start, f"{what} is longer than {MAX_NAME_BYTES} bytes")
        return text

    def string(self, what: str) -> str:
        start = self.position
        length = self.count(f"length of {what}", 1)
        raw = self.mapping[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(start + 8 + error.start, f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self.array(key, depth)
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self.error(self.position - 4, f"metadata {key!r} has unknown type {kind}")
        return self.numbers(dtype, 1, key)[0].item()

    def array(self, key: str, depth: int) -> Any:
        start = self.position
        if depth == MAX_NESTING:
            raise self.error(start, f"metadata {key!r} nests arrays more than {MAX_NESTING} deep")
        kind = self.number("<I", f"item type of {key}")
        if kind == STRING:
            return self.strings(self.count(f"length of {key}", 8), key)
        if kind == ARRAY:
            return [self.array(key, depth + 1) for _ in range(self.count(f"length of {key}", 12))]
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self.error(start, f"metadata {key!r} has items of unknown type {kind}")
        return self.numbers(dtype, self.count(f"length of {key}", dtype.itemsize), key)

    def numbers(self, dtype: np.dtype[Any], count: int, key: str) -> np.ndarray:
        nbytes = dtype.itemsize * count
        if nbytes > self.size - self.position:
            raise self.error(self.position, f"the file ends inside metadata {key!r}")
        raw = self.mapping[self.position : self.position + nbytes]
        self.position += nbytes
        if dtype.kind == "b":  # any non-zero byte is true, but numpy wants 0 or 1
            return np.frombuffer(raw, dtype=np.uint8).astype(np.bool_)
        return np.frombuffer(raw, dtype=dtype)

    def strings(self, count: int, key: str) -> list[str]:
        """Vocabularies have up to 300,000 strings: the loop does as little as it can for each."""
        mapping, unpack = self.mapping, struct.Struct("<Q").unpack_from
        position, size = self.position, self.size
        texts: list[str] = []
        start = position
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(mapping, position)[0]
                texts.append(mapping[start:position].decode("utf-8"))
        except (struct.error, OverflowError, IndexError):
            position = size + 1
        except UnicodeDecodeError as error:
            raise self.error(start + error.start, f"a string of metadata {key!r} is not UTF-8") from None
        if position > size:
            raise self.error(start, f"a string of metadata {key!r} ends past the end of the file")
        self.position = position
        return texts
