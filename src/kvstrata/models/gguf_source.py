"""Weights of a GGUF file under canonical names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from kvstrata.errors import ModelError
from kvstrata.models.dequantize import check_format, dequantize
from kvstrata.models.gguf import GGUFFile
from kvstrata.models.gguf_config import ROPE_FACTORS, architecture_of, read_config
from kvstrata.models.weights import RawTensor, expected_shapes

GLOBAL_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
}


class GGUFSource:
    """A `WeightSource` over one memory-mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile.open(path)
        try:
            self.config = read_config(self.file)
            self._interleaved = architecture_of(self.file)[1].interleaved_rope
            self._stored = self._match_names()
        except ModelError:
            self.file.close()
            raise

    def names(self) -> Iterable[str]:
        """Canonical names present."""
        return self._stored.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor dequantised to float32, q and k rows in half-rotation order. Raises ModelError."""
        raw = self.raw(name)
        # the rows are ordered while they are small: 4 to 8 times fewer bytes than after dequantising
        data = raw.data if raw.row_order is None else raw.data[raw.row_order]
        return dequantize(data, raw.format, raw.shape)

    def raw(self, name: str) -> RawTensor:
        """The tensor as stored. Raises ModelError."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.file.path}: the model has no tensor {name!r}")
        entry = self.file.tensors[stored]
        data = self.file.data(stored)
        order = self._row_order(name)
        if order is not None and len(entry.shape) == 1:  # a bias is one row: order its elements instead
            data = np.ascontiguousarray(data.reshape(entry.shape[0], -1)[order]).reshape(1, -1)
            order = None
        return RawTensor(entry.format, entry.shape, data, order)

    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(self.file.tensors[stored].nbytes for stored in self._stored.values())

    def close(self) -> None:
        """Unmap the file."""
        self.file.close()

    def _row_order(self, name: str) -> np.ndarray | None:
        """Half-rotation row r = head * D + half * D/2 + j is stored as row head * D + 2 * j + half."""
        part = name.split(".")[2] if name.startswith("layers.") else ""
        if not self._interleaved or part not in ("q", "k"):
            return None
        heads = self.config.num_heads if part == "q" else self.config.num_kv_heads
        stored = np.arange(heads * self.config.head_dim).reshape(heads, self.config.head_dim // 2, 2)
        return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1)

    def _match_names(self) -> dict[str, str]:
        """Canonical to stored names, once every tensor is there with its shape and nothing is left over."""
        path, tensors = self.file.path, self.file.tensors
        matched: dict[str, str] = {}
        for name, shape in expected_shapes(self.config).items():
            stored = _stored_name(name)
            entry = tensors.get(stored)
            if entry is None:
                raise ModelError(f"{path}: tensor {stored!r} is missing: incomplete, or another architecture")
            if entry.shape != shape:
                raise ModelError(f"{path}: tensor {stored!r} has shape {entry.shape}, expected {shape}")
            check_format(stored, entry.format, str(path))
            matched[name] = stored
        for stored in tensors.keys() - set(matched.values()) - {ROPE_FACTORS}:
            raise ModelError(
                f"{path}: tensor {stored!r} is not part of a {self.config.architecture} decoder as kvstrata "
                f"knows it (fused, expert or adapter tensors are not supported)"
            )
        return matched


def _stored_name(name: str) -> str:
    if not name.startswith("layers."):
        part, kind = name.split(".")
        return f"{GLOBAL_NAMES[part]}.{kind}"
    _, layer, part, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"
