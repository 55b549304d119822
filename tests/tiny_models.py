"""Tiny models written to files, so that readers are tested on what the usual tools write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 64, 4, 2, 8, 2, 40


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows from half-rotation order to the adjacent pairs that a llama GGUF holds."""
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def weights(
    seed: int = 0, *, qk_norm: bool = False, sandwich: bool = False, bias: bool = False
) -> dict[str, Any]:
    """Random float32 tensors of a tiny decoder under canonical names."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "final_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "q.weight": (q, HIDDEN),
            "k.weight": (kv, HIDDEN),
            "v.weight": (kv, HIDDEN),
            "o.weight": (HIDDEN, q),
            "mlp_norm.weight": (HIDDEN,),
            "gate.weight": (INNER, HIDDEN),
            "up.weight": (INNER, HIDDEN),
            "down.weight": (HIDDEN, INNER),
        }
        if qk_norm:
            of_layer |= {"q_norm.weight": (HEAD_DIM,), "k_norm.weight": (HEAD_DIM,)}
        if sandwich:
            of_layer |= {"post_attn_norm.weight": (HIDDEN,), "post_mlp_norm.weight": (HIDDEN,)}
        if bias:
            of_layer |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_PARTS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_attn_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a canonical tensor."""
    parts = name.split(".")
    if parts[0] != "layers":
        return {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}[parts[0]] + ".weight"
    return f"blk.{parts[1]}.{GGUF_PARTS[parts[2]]}.{parts[3]}"


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    **metadata: Any,
) -> Path:
    """A GGUF file of a tiny model. tensors: under stored names; metadata: adds to or replaces the usual keys
    (None drops one), `__` stands for a dot.
    """
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    keys |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in keys.items():
        _add(writer, key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def tiny_gguf(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Write a tiny model. tensors: under canonical names; extra: under stored ones."""
    stored = {gguf_name(name): data for name, data in (tensors or weights()).items()}
    return write_gguf(path, stored | (extra or {}), architecture, **metadata)


HF_PARTS = {
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
HF_GLOBALS = {"embed": "embed_tokens", "final_norm": "norm"}
GEMMA_PARTS = HF_PARTS | {
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def hf_config(
    model_type: str = "llama", architecture: str = "LlamaForCausalLM", **changes: Any
) -> dict[str, Any]:
    """A config.json of a tiny model."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def hf_name(name: str, base: str = "model.", *, gemma: bool = False) -> str:
    """The Hugging Face name of a canonical tensor."""
    parts = name.split(".")
    if parts[0] == "head":
        return "lm_head.weight"
    if parts[0] != "layers":
        return f"{base}{HF_GLOBALS[parts[0]]}.weight"
    return f"{base}layers.{parts[1]}.{(GEMMA_PARTS if gemma else HF_PARTS)[parts[2]]}.{parts[3]}"


def hf_folder(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shards: int = 1
) -> Path:
    """A model folder. tensors: under stored names; shards above 1 write an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
