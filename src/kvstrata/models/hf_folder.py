"""Weights of a Hugging Face folder (config.json and safetensors, sharded or not) under canonical names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from kvstrata.errors import ModelError
from kvstrata.models.config import DecoderConfig
from kvstrata.models.hf_config import read_config, read_json
from kvstrata.models.safetensors_file import ITEM_BYTES, SafetensorsFile
from kvstrata.models.weights import RawTensor, expected_shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Multimodal checkpoints nest the language model, differently over the releases of Transformers.
BASES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
OTHER_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
GLOBAL_NAMES = {"embed": "embed_tokens", "final_norm": "norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
SANDWICH_NAMES = {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def pickle_refusal(path: Path) -> ModelError:
    """The error for weights that only unpickling could read, which may run code that the file brings."""
    return ModelError(
        f"{path}: pickled weights are never loaded, since unpickling runs code from the file; where you "
        f"trust it, convert it with Transformers: AutoModelForCausalLM.from_pretrained(FOLDER)"
        f".save_pretrained(NEW) writes safetensors"
    )


class HFFolder:
    """A `WeightSource` over the memory-mapped safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = _weight_files(folder)
        self.config: DecoderConfig = read_config(folder)
        self._files: dict[str, SafetensorsFile] = {}  # stored tensor name -> its file
        for path in paths:
            file = SafetensorsFile(path)
            self._files.update(dict.fromkeys(file.tensors, file))
        _check_index(folder, self._files)
        self._stored = self._match_names()

    def names(self) -> Iterable[str]:
        """Canonical names present."""
        return self._stored.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in float32 (over the mapped file where it is stored so). Raises ModelError."""
        stored = self._lookup(name)
        tensor = self._files[stored].load(stored).to(torch.float32)
        return tensor + 1.0 if self._is_offset_norm(name) else tensor

    def raw(self, name: str) -> RawTensor:
        """The tensor as stored; a Gemma norm in float32 with its one added. Raises ModelError."""
        stored = self._lookup(name)
        if self._is_offset_norm(name):
            norm = self.tensor(name)
            return RawTensor("F32", tuple(norm.shape), _bytes(norm))
        tensor = self._files[stored].load(stored)
        return RawTensor(self._files[stored].tensors[stored].format, tuple(tensor.shape), _bytes(tensor))

    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(self._files[stored].tensors[stored].nbytes for stored in self._stored.values())

    def close(self) -> None:
        """Unmap the files."""
        for file in set(self._files.values()):
            file.close()

    def _lookup(self, name: str) -> str:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.folder}: the model has no tensor {name!r}")
        return stored

    def _is_offset_norm(self, name: str) -> bool:
        return self.config.architecture == "gemma3" and name.endswith("_norm.weight")

    def _match_names(self) -> dict[str, str]:
        """Canonical to stored names, once every tensor is there with its shape and nothing is left over."""
        base = next((b for b in BASES if f"{b}embed_tokens.weight" in self._files), None)
        if base is None:
            raise ModelError(f"{self.folder}: tensor 'model.embed_tokens.weight' is missing")
        head = next((name for name in HEADS if name in self._files), HEADS[0])
        matched: dict[str, str] = {}
        for name, shape in expected_shapes(self.config).items():
            stored = head if name == "head.weight" else base + self._stored_name(name)
            file = self._files.get(stored)
            if file is None:
                raise ModelError(f"{self.folder}: tensor {stored!r} is missing")
            entry = file.tensors[stored]
            if entry.format not in ITEM_BYTES:
                raise ModelError(
                    f"{file.path}: tensor {stored!r} has format {entry.format}, which is not supported; "
                    f"supported are {', '.join(ITEM_BYTES)}"
                )
            if entry.shape != shape:
                raise ModelError(f"{file.path}: tensor {stored!r} has shape {entry.shape}, expected {shape}")
            matched[name] = stored
        for stored in self._files.keys() - set(matched.values()):
            # buffers that old releases saved, a copy of a tied head, and the parts that see images
            if (
                not stored.endswith("rotary_emb.inv_freq")
                and stored != head
                and not stored.startswith(OTHER_PARTS)
            ):
                raise ModelError(
                    f"{self._files[stored].path}: tensor {stored!r} is not part of a "
                    f"{self.config.architecture} decoder as kvstrata knows it "
                    f"(fused, expert or adapter tensors are not supported)"
                )
        return matched

    def _stored_name(self, name: str) -> str:
        if not name.startswith("layers."):
            part, kind = name.split(".")
            return f"{GLOBAL_NAMES[part]}.{kind}"
        _, layer, part, kind = name.split(".")
        names = LAYER_NAMES | SANDWICH_NAMES if self.config.sandwich_norms else LAYER_NAMES
        return f"layers.{layer}.{names[part]}.{kind}"


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes, uint8 `[rows, bytes per row]`, without a copy."""
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    flat: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.reshape(rows, -1)


def _weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises ModelError where there are none, or one is missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        shards = sorted(set(_weight_map(folder).values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise ModelError(f"{folder / shard}: this shard is missing, {INDEX} names it")
        return [folder / shard for shard in shards]
    pickled = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled:
        raise pickle_refusal(pickled[0])
    raise ModelError(f"{folder}: has neither {SINGLE} nor {INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map is missing, expected tensor names and their shards")
    for name, shard in weight_map.items():
        # a shard lies beside its index: a path would let a downloaded index read elsewhere
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{path}: weight_map of {name!r} is {shard!r}, expected a .safetensors file name"
            )
    return weight_map


def _check_index(folder: Path, files: dict[str, SafetensorsFile]) -> None:
    if (folder / SINGLE).is_file():
        return
    for name, shard in _weight_map(folder).items():
        if name not in files or files[name].path.name != shard:
            raise ModelError(f"{folder / shard}: tensor {name!r} is missing, {INDEX} says it is here")
