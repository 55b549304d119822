"""Where `kvstrata size` gets its facts: a config.json, a folder, a GGUF file, or an installed model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.cache.gguf_fields import config_from_gguf
from kvstrata.cache.parameters import WEIGHT_BITS, count_parameters, weights_bytes
from kvstrata.errors import ConfigError, KVStrataError, ModelError
from kvstrata.models.gguf import GGUFFile
from kvstrata.models.locate import locate

CONFIG = "config.json"
MAX_CONFIG_BYTES = 64 * 2**20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SizeSource:
    """A model as the sizing sees it.

    file_bytes: of all tensors as stored (None where only a configuration is at hand). parameters: elements of
    the file's tensors (GGUF only).
    """

    path: Path
    config: Mapping[str, Any]
    file_bytes: int | None = None
    parameters: int | None = None

    def weights(self, dtype: str) -> tuple[int | None, str, str]:
        """(bytes, format, "file" or "estimate" or why there is none), for a weight format or `auto`.

        Raises ConfigError for an unknown dtype.
        """
        if dtype == "auto" and self.file_bytes is not None:
            return self.file_bytes, "as stored", "file"
        if dtype not in ("auto", *WEIGHT_BITS):
            raise ConfigError(f"weights_dtype is {dtype!r}; choose one of auto, {', '.join(WEIGHT_BITS)}")
        if self.parameters is not None:
            return math.ceil(self.parameters * WEIGHT_BITS[dtype] / 8), dtype, "file"
        try:
            size, name = weights_bytes(self.config, dtype)
        except KVStrataError as error:  # the cache can be sized without knowing what weights depend on
            return None, dtype, str(error)
        return size, name, "estimate"

    def parameter_count(self) -> int | None:
        """Parameters, None where the configuration does not tell."""
        if self.parameters is not None:
            return self.parameters
        try:
            return count_parameters(self.config).total
        except KVStrataError:
            return None


def read_size_source(model: str) -> SizeSource:
    """The facts behind a path or the name of an installed model. Raises ModelError naming what is wrong."""
    path = locate(model)
    if path.is_dir():
        return _from_folder(path)
    if _is_gguf(path):
        return _from_gguf(path)
    if path.suffix == ".json":
        return SizeSource(path, _read_json(path))
    raise ModelError(f"{path}: neither a config.json, nor a model folder, nor a GGUF file; give one of these")


def _from_folder(folder: Path) -> SizeSource:
    config = folder / CONFIG
    if config.is_file():
        return SizeSource(config, _read_json(config), _safetensors_bytes(folder))
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _from_gguf(files[0])
    found = f"{len(files)} GGUF files" if files else "no GGUF file"
    raise ModelError(
        f"{folder}: holds no {CONFIG} and {found}; give a folder with a {CONFIG}, or one GGUF file"
    )


def _from_gguf(path: Path) -> SizeSource:
    file = GGUFFile.open(path)
    try:
        if file.metadata.get("split.count", 0) not in (0, 1):
            raise ModelError(
                f"{path}: one part of a split GGUF file; merge the parts (llama-gguf-split --merge)"
            )
        tensors = file.tensors.values()
        return SizeSource(
            path,
            config_from_gguf(file.metadata),
            sum(tensor.nbytes for tensor in tensors),
            sum(math.prod(tensor.shape) for tensor in tensors),
        )
    finally:
        file.close()


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(
            f"{path}: {path.stat().st_size:,} bytes is no configuration; give the model's {CONFIG}"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); give the model's {CONFIG}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}; a {CONFIG} holds one object")
    return value


def _safetensors_bytes(folder: Path) -> int | None:
    """Bytes of the tensors in a folder's safetensors files, None without any."""
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: has no weight_map; download the file again")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder}: {missing[0]} is missing, one of {len(files)} weight files; download it again"
        )
    return sum(_tensor_bytes(file) for file in files) if files else None


def _tensor_bytes(path: Path) -> int:
    """A safetensors file is eight bytes with the header's length, the header, and nothing but tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if 8 + header > size:
        raise ModelError(f"{path}: truncated at {size:,} bytes, inside its header; download the file again")
    return size - 8 - int(header)
