"""A Hugging Face config.json to DecoderConfig, in the forms of Transformers 4 and 5.

Whether a field is absent (the family's default holds) or null (it is off) matters, as it does there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from kvstrata.errors import ModelError
from kvstrata.models.config import DecoderConfig, LayerConfig, RopeConfig
from kvstrata.models.config_fields import Fields, check_config, shown
from kvstrata.models.hf_families import Family, family_of

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DEFAULT_THETA = 10_000.0
GEMMA3_PATTERN = 6


UNSUPPORTED = {
    "quantization_config": "quantised safetensors are not supported: use the full model or a GGUF",
    "attn_logit_softcapping": "logit soft-capping is not supported",
    "final_logit_softcapping": "logit soft-capping is not supported",
    "use_bidirectional_attention": "only causal attention is supported",
    "rope_interleaved": "interleaved RoPE is not supported",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming file and offset."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: at character {error.pos}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: at byte {error.start}: not UTF-8 text") from error
    except RecursionError as error:
        raise ModelError(f"{path}: not a configuration: JSON nested too deep") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config(folder: Path) -> DecoderConfig:
    """The configuration of a model folder, its end-of-text ids from generation_config.json too."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: has no config.json: not a Hugging Face model folder")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return decoder_config(read_json(path), str(path), generation)


def decoder_config(
    values: Mapping[str, Any], where: str, generation: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """A DecoderConfig of a parsed config.json. Raises ModelError naming file, field and value."""
    family = family_of(values, where)
    fields = Fields(_merged(values, family), where)
    for key, why in UNSUPPORTED.items():
        fields.must_not_be_set([key], why)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=max(1, hidden // heads))
    attention_bias = family.attention_bias and fields.flag("attention_bias", False)
    act_key = "hidden_activation" if family.gemma else "hidden_act"
    act = fields.text(act_key, default="silu")
    if act not in ACTIVATIONS:
        raise fields.error(act_key, f"is {act!r}, not supported: {', '.join(ACTIVATIONS)} are")
    scale = fields.number("query_pre_attn_scalar") ** -0.5 if family.gemma else 0.0
    config = DecoderConfig(
        architecture=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        layers=_layers(family, fields),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_position=fields.integer("max_position_embeddings"),
        activation=ACTIVATIONS[act],
        attention_scale=scale,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
        sandwich_norms=family.gemma,
        embedding_scale=math.sqrt(hidden) if family.gemma else 1.0,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=fields.optional_integer("bos_token_id", least=0),
        eos_token_ids=_eos_ids(fields, Fields(generation or {}, where)),
    )
    return check_config(config, where)


def _merged(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of the language model: a multimodal file nests them and says some for the whole."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        return {**family.defaults, **values}
    of_the_whole = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    return {**family.defaults, **text, **{key: values[key] for key in of_the_whole if key in values}}


def _eos_ids(*sources: Fields) -> tuple[int, ...]:
    ids: list[int] = []
    for fields in sources:
        value = fields.get("eos_token_id")
        items = value if isinstance(value, list) else [] if value is None else [value]
        ids += [
            Fields({"eos_token_id": item}, fields.where).integer("eos_token_id", least=0) for item in items
        ]
    return tuple(dict.fromkeys(ids))


def _layers(family: Family, fields: Fields) -> tuple[LayerConfig, ...]:
    count = fields.layers("num_hidden_layers")
    window = _window(family, fields)
    kinds = _layer_kinds(family, fields, count, window)
    ropes = {kind: _rope(family, fields, kind) for kind in set(kinds)}
    return tuple(LayerConfig(window if kind == SLIDING else None, ropes[kind]) for kind in kinds)


def _window(family: Family, fields: Fields) -> int | None:
    if family.windows == "none":
        return None
    if family.windows == "upper" and not fields.flag("use_sliding_window", False):
        return None  # Qwen writes a window and then does not use it
    return fields.optional_integer("sliding_window")


def _layer_kinds(family: Family, fields: Fields, count: int, window: int | None) -> list[str]:
    """The attention of each layer; for Gemma a layer's kind also chooses its RoPE base."""
    if family.windows in ("none", "all") or (family.windows == "upper" and window is None):
        return [SLIDING if window is not None else FULL] * count
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:
            raise fields.error(
                "layer_types", f"is {shown(kinds)}, expected {count} of {SLIDING!r} or {FULL!r}"
            )
        return kinds
    if family.windows == "upper":
        first = fields.integer("max_window_layers", default=28, least=0)
        return [SLIDING if layer >= first else FULL for layer in range(count)]
    key = (
        "_sliding_window_pattern"
        if fields.get("sliding_window_pattern") is None
        else "sliding_window_pattern"
    )
    period = fields.integer(key, default=GEMMA3_PATTERN)
    return [SLIDING if (layer + 1) % period else FULL for layer in range(count)]


def _rope(family: Family, fields: Fields, layer_kind: str) -> RopeConfig:
    """Transformers 5 has `rope_parameters`, flat or by layer kind; 4 has `rope_theta` and `rope_scaling`."""
    for key in ("rope_parameters", "rope_scaling"):
        if fields.get(key) is not None and not isinstance(fields.get(key), dict):
            raise fields.error(key, f"is {shown(fields.get(key))}, expected an object")
    local = family.gemma and layer_kind == SLIDING
    flat = fields.get("rope_parameters") or {}
    by_kind = flat.get(layer_kind)
    if not isinstance(by_kind, dict):
        by_kind = {} if family.gemma else flat
    parameters = dict(by_kind)
    if not local:  # Gemma scales its global layers only
        parameters |= fields.get("rope_scaling") or {}
    theta_key, default_theta = "rope_theta", 1e6 if family.gemma else DEFAULT_THETA
    if local:
        theta_key, default_theta = "rope_local_base_freq", DEFAULT_THETA
    rope = Fields(parameters, fields.where)
    theta = rope.number("rope_theta", default=fields.number(theta_key, default=default_theta))
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind not in ROPE_KINDS:
        raise fields.error("rope_type", f"is {kind!r}, which is not supported: {', '.join(ROPE_KINDS)} are")
    partial = rope.number(
        "partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0)
    )
    if partial != 1.0:
        raise fields.error("partial_rotary_factor", f"is {partial}: partial RoPE is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    return _scaled_rope(rope, fields, theta, cast(Literal["linear", "llama3", "yarn"], kind))


def _scaled_rope(
    rope: Fields, fields: Fields, theta: float, kind: Literal["linear", "llama3", "yarn"]
) -> RopeConfig:
    longest = fields.integer("max_position_embeddings")
    original = fields.optional_integer("original_max_position_embeddings") or rope.integer(
        "original_max_position_embeddings", default=longest
    )
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=rope.number("factor"),
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor", default=longest / original),
        original_max_position=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale") if rope.get("mscale") else None,
        mscale_all_dim=rope.optional_number("mscale_all_dim") if rope.get("mscale_all_dim") else None,
        truncate=rope.flag("truncate", True),
    )
