"""A model's configuration under one set of names, whatever its family calls them.

The input is what a `config.json` parses to. Nested text configurations are unwrapped, synonyms renamed, and
what a file leaves to the library that reads it is filled in from the defaults of that library (Transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import ModelError

NESTED = ("text_config", "llm_config", "language_config")

# Stated beside a nested text configuration, but true of the text decoder.
OUTER_FIELDS = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")

SYNONYMS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "dtype": ("torch_dtype",),
}

_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
}
_QWEN_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
    "full_attention_interval": 4,
}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

# What Transformers assumes where a family's file is silent (only what sizes depend on).
LIBRARY_DEFAULTS: dict[str, dict[str, int]] = {
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
    },
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    },
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "qwen3_next": _QWEN_LINEAR,
    "qwen3_5_text": _QWEN_LINEAR,
    "qwen3_5_moe_text": _QWEN_LINEAR,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, "index_head_dim": 128},
    "kimi_k2": _DEEPSEEK,
}


@dataclass(frozen=True)
class ModelFields:
    """The text decoder's settings under their common names. model_type: the family, as the file states it."""

    model_type: str
    values: Mapping[str, Any]
    defaulted: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above zero. Raises ModelError naming field and value; without it, `default`."""
        value = self.values.get(name)
        if value is None:
            if default is not None:
                return default
            raise ModelError(
                f"the configuration (model_type {self.model_type!r}) has no {name!r}: "
                "a size cannot be computed without it; add it or give the model's own config.json"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"{name} is {value!r}; it must be a whole number above zero")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """A whole number of at least zero. Raises ModelError naming field and value."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{name} is {value!r}; it must be a whole number of at least zero")
        return value

    def indices(self, name: str) -> tuple[int, ...]:
        """Numbers of layers; none where the field is absent. Raises ModelError naming field and value."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise ModelError(f"{name} is {value!r}; it must be a list of layer numbers")
        return tuple(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value. Raises ModelError naming field and value."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{name} is {value!r}; it must be true or false")
        return value


def model_fields(config: Mapping[str, Any]) -> ModelFields:
    """The settings of a parsed `config.json` under common names.

    Raises ModelError where the mapping is no model configuration.
    """
    values = dict(config)
    for key in NESTED:
        nested = values.get(key)
        if isinstance(nested, Mapping):
            outer = {name: values[name] for name in OUTER_FIELDS if name in values}
            values = {**outer, "model_type": values.get("model_type"), **nested}
            break
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"model_type is {model_type!r}; a model's config.json names its family there, such as 'llama'"
        )
    attention = values.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("kv_n_heads") is not None:
        values.setdefault("num_key_value_heads", attention["kv_n_heads"])
    for name, others in SYNONYMS.items():
        for other in others:
            if values.get(name) is None and values.get(other) is not None:
                values[name] = values[other]
    defaults = LIBRARY_DEFAULTS.get(model_type, {})
    # An explicit null is a choice ("no window"); only an absent field takes the library's default.
    missing = tuple(name for name in defaults if name not in values)
    values.update({name: defaults[name] for name in missing})
    return ModelFields(model_type=model_type, values=values, defaulted=missing)
