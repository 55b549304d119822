"""GGUF metadata to DecoderConfig.

What a file does not say is read off its tensors: biases, tied embeddings, the vocabulary's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstrata.errors import ModelError
from kvstrata.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvstrata.models.config_fields import Fields, check_config
from kvstrata.models.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
GEMMA3_27B_LAYERS = 62
GEMMA3_PATTERN = 6  # five local layers, then a global one
GEMMA3_LOCAL_THETA = 10_000.0


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture implies. interleaved_rope: q and k rows are stored in adjacent pairs."""

    interleaved_rope: bool = False
    qk_norm: bool = False
    gemma: bool = False


ARCHITECTURES = {
    "llama": Architecture(interleaved_rope=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "gemma3": Architecture(qk_norm=True, gemma=True),
}


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """The file's architecture. Raises ModelError naming it and those supported."""
    name = Fields(file.metadata, str(file.path)).text("general.architecture")
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported; supported GGUF architectures are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name, found


def read_config(file: GGUFFile) -> DecoderConfig:
    """The decoder's configuration. Raises ModelError naming file, field and value."""
    where = str(file.path)
    top = Fields(file.metadata, where)
    if top.integer("split.count", default=1, least=0) > 1:
        raise top.error(
            "split.count", "is above 1, a split model: join its parts with llama-gguf-split --merge"
        )
    name, architecture = architecture_of(file)
    fields = Fields(file.metadata, where, prefix=f"{name}.")
    fields.must_not_be_set(["expert_count"], "mixtures of experts are not supported")
    fields.must_not_be_set(
        ["attn_logit_softcapping", "final_logit_softcapping"], "logit soft-capping is not supported"
    )
    hidden = fields.integer("embedding_length")
    heads = _one_for_all_layers(fields, "attention.head_count", default=None)
    kv_heads = _one_for_all_layers(fields, "attention.head_count_kv", default=heads)
    head_dim = fields.integer("attention.key_length", default=max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, default=head_dim) != head_dim:
            raise fields.error(key, f"is {fields.get(key)}, other than the head dimension {head_dim}")
    num_layers = fields.layers("block_count")
    config = DecoderConfig(
        architecture=name,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=_one_for_all_layers(fields, "feed_forward_length", default=None),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_layers(file, fields, num_layers, architecture),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position=fields.integer("context_length"),
        activation="gelu_tanh" if architecture.gemma else "silu",
        attention_scale=_attention_scale(architecture, num_layers, hidden, heads),
        qk_norm=architecture.qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sandwich_norms=architecture.gemma,
        embedding_scale=math.sqrt(hidden) if architecture.gemma else 1.0,
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=top.optional_integer("tokenizer.ggml.bos_token_id", least=0),
        eos_token_ids=_eos_ids(file),
    )
    return check_config(config, where)


def _one_for_all_layers(fields: Fields, key: str, default: int | None) -> int:
    """A value that a file may give once or per layer; the decoder takes one for all layers."""
    value = fields.get(key)
    if not isinstance(value, np.ndarray):
        return fields.integer(key, default=default)
    if len(set(value.tolist())) != 1:
        raise fields.error(key, "differs between layers, which is not supported")
    return Fields({key: value[0].item()}, fields.where).integer(key)


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' [vocabulary, hidden] is missing")
    return embedding.shape[0]


def _attention_scale(architecture: Architecture, num_layers: int, hidden: int, heads: int) -> float:
    # GGUF has no field for Gemma's query_pre_attn_scalar; only the 27B differs from the head dimension.
    if architecture.gemma and num_layers == GEMMA3_27B_LAYERS:
        return float((hidden / heads) ** -0.5)
    return 0.0


def _layers(
    file: GGUFFile, fields: Fields, num_layers: int, architecture: Architecture
) -> tuple[LayerConfig, ...]:
    window = fields.optional_integer("attention.sliding_window", least=0) or None
    rope = _rope(file, fields)
    if not architecture.gemma:
        return (LayerConfig(window, rope),) * num_layers
    local_rope = RopeConfig(theta=fields.number("rope.freq_base_swa", default=GEMMA3_LOCAL_THETA))
    is_local = _local_layers(fields, num_layers)
    return tuple(LayerConfig(window, local_rope) if local else LayerConfig(None, rope) for local in is_local)


def _local_layers(fields: Fields, num_layers: int) -> list[bool]:
    key = "attention.sliding_window_pattern"
    pattern = fields.get(key)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != num_layers:
            raise fields.error(key, f"has {len(pattern)} entries for {num_layers} layers")
        return [bool(local) for local in pattern]
    period = fields.integer(key, default=GEMMA3_PATTERN)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _rope(file: GGUFFile, fields: Fields) -> RopeConfig:
    theta = fields.number("rope.freq_base", default=10_000.0)
    factor = (
        fields.optional_number("rope.scaling.factor") or fields.optional_number("rope.scale_linear") or 1.0
    )
    kind = fields.text("rope.scaling.type", default="linear" if factor != 1.0 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("rope.scaling.type", f"is {kind!r}, not supported: none, linear and yarn are")
    rope_kind: Literal["default", "linear", "yarn"] = "default"
    if kind == "linear" and factor != 1.0:
        rope_kind = "linear"
    elif kind == "yarn":
        rope_kind = "yarn"
    multiplier = fields.optional_number("rope.scaling.yarn_attn_factor") or fields.optional_number(
        "rope.scaling.attn_factor"
    )
    original = fields.integer(
        "rope.scaling.original_context_length", default=fields.integer("context_length")
    )
    attention_factor = None
    if rope_kind == "yarn" and multiplier is not None:
        attention_factor = multiplier * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return RopeConfig(
        theta=theta,
        kind=rope_kind,
        factor=factor if rope_kind != "default" else 1.0,
        original_max_position=original if rope_kind == "yarn" else 0,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
        attention_factor=attention_factor,
        freq_factors=_freq_factors(file),
    )


def _freq_factors(file: GGUFFile) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.format != "F32" or len(tensor.shape) != 1:
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS!r} must be a vector of F32, is {tensor.format}")
    factors = file.data(ROPE_FACTORS).reshape(-1).view(np.float32)
    if not bool(np.all(np.isfinite(factors) & (factors > 0))):
        raise ModelError(f"{file.path}: at byte {tensor.offset}: {ROPE_FACTORS!r} has factors not above 0")
    return tuple(float(factor) for factor in factors)


def _eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """The ids that the metadata names; what a vocabulary's texts tell besides is the tokenizer's to say."""
    fields = Fields(file.metadata, str(file.path), prefix="tokenizer.ggml.")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields.optional_integer(key, least=0) for key in keys]
    return tuple(dict.fromkeys(token for token in ids if token is not None))
