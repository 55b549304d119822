"""A GGUF file's metadata as the configuration that the sizing reads; names as in the GGUF specification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.errors import ModelError

# GGUF's architecture -> the family name that a config.json has; others keep their name.
FAMILIES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "deepseek2": "deepseek_v3",
    "phi2": "phi",
    "gptneox": "gpt_neox",
    "command-r": "cohere",
    "starcoder": "gpt_bigcode",
}

COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "leading_dense_block_count": "first_k_dense_replace",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}
STATES = ("ssm.", "wkv.", "shortconv.", "time_mix", "token_shift_count")


def config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a GGUF file's metadata states.

    metadata: scalars as int, float, bool or str, arrays as lists or numpy arrays. Raises ModelError where the
    architecture is missing or keeps states for which there is no rule.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelError(
            f"general.architecture is {architecture!r}; a GGUF file names its architecture there"
        )
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in own:
        if key.startswith(STATES):
            raise ModelError(
                f"not supported: recurrent layers of GGUF files have no cache rule ({prefix}{key})"
            )
    if any(key.startswith("attention.indexer.") for key in own):
        raise ModelError(
            f"not supported: indexer layers of GGUF architecture {architecture!r} have no cache rule"
        )
    config: dict[str, Any] = {"model_type": FAMILIES.get(architecture, architecture)}
    config.update({name: _plain(own[key]) for key, name in COMMON.items() if key in own})
    if "sliding_window" in config and config["sliding_window"] == 0:
        config["sliding_window"] = None
    _set_layer_types(config, own)
    if "attention.kv_lora_rank" in own:
        _set_latent(config, own)
    if architecture == "gemma4":
        _set_gemma4(config, own)
    if architecture in ("falcon", "starcoder"):
        config["multi_query"] = config.get("num_key_value_heads") == 1
    if "vocab_size" not in config and "tokenizer.ggml.tokens" in metadata:
        config["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    return config


def _plain(value: Any) -> Any:
    """Python numbers for numpy arrays, and one number for an array that repeats it."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    items = [item.item() if hasattr(item, "item") else item for item in value]
    return items[0] if items and all(item == items[0] for item in items) else items


def _set_layer_types(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, Iterable):
        names = ("full_attention", "sliding_attention")
        config["layer_types"] = [names[bool(item)] for item in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = int(pattern)


def _set_latent(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Converters write the latent as one KV head's key, and the heads' own sizes under `_mla` names."""
    rope = int(own.get("rope.dimension_count", 64))
    key = int(own.get("attention.key_length_mla", own.get("attention.key_length", 192)))
    config["kv_lora_rank"] = int(own["attention.kv_lora_rank"])
    config["qk_rope_head_dim"] = rope
    config["qk_nope_head_dim"] = key - rope
    config["v_head_dim"] = int(own.get("attention.value_length_mla", own.get("attention.value_length", 128)))
    if "attention.q_lora_rank" in own:
        config["q_lora_rank"] = int(own["attention.q_lora_rank"])
    config.pop("head_dim", None)
    config["num_key_value_heads"] = config["num_attention_heads"]


def _set_gemma4(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Full layers have the plain key length, sliding ones the `_swa` one; KV heads are given a layer."""
    config["global_head_dim"] = config["head_dim"]
    config["head_dim"] = int(own.get("attention.key_length_swa", config["head_dim"]))
    config.pop("v_head_dim", None)
    heads = config.get("num_key_value_heads")
    kinds = config.get("layer_types")
    if isinstance(heads, list) and kinds is not None:
        by_kind = dict(zip(kinds, heads, strict=False))
        config["num_key_value_heads"] = by_kind.get("sliding_attention", heads[0])
        config["num_global_key_value_heads"] = by_kind.get("full_attention", heads[-1])
        config["attention_k_eq_v"] = True
