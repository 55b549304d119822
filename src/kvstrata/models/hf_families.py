"""The Hugging Face model families that the decoder covers, with the defaults of their configuration classes.

A config.json may leave out what equals a default (gemma-3-4b names no head counts), so they are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvstrata.errors import ModelError
from kvstrata.models.config_fields import shown


@dataclass(frozen=True)
class Family:
    """What a model type implies.

    qkv_bias: always there; attention_bias, mlp_bias: the file may ask for them. windows: which layers slide
    (`upper`: from max_window_layers on; `pattern`: all but every sixth).
    """

    name: str
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    windows: Literal["none", "all", "upper", "pattern"] = "none"


_SIZES_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}

LLAMA = Family(
    "llama",
    defaults={
        **_SIZES_7B,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    attention_bias=True,
    mlp_bias=True,
)
MISTRAL = Family(
    "mistral",
    defaults={
        **_SIZES_7B,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    windows="all",
)
_QWEN_DEFAULTS = {
    **_SIZES_7B,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
QWEN2 = Family("qwen2", defaults=_QWEN_DEFAULTS, qkv_bias=True, windows="upper")
QWEN3 = Family(
    "qwen3",
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    attention_bias=True,
    qk_norm=True,
    windows="upper",
)
GEMMA3 = Family(
    "gemma3",
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    attention_bias=True,
    qk_norm=True,
    gemma=True,
    windows="pattern",
)

ARCHITECTURES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
}
MODEL_TYPES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3,
}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names. Raises ModelError naming it and those supported."""
    architectures = values.get("architectures")
    if isinstance(architectures, list) and architectures:
        name, known = architectures[0], ARCHITECTURES
    else:
        name, known = values.get("model_type"), MODEL_TYPES
    family = known.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelError(
            f"{where}: architecture {shown(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return family
