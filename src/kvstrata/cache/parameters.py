"""How many parameters a model has, and how many bytes they take, from its configuration alone.

The count is exact for the families listed in `TRAITS` (their text decoder, without vision towers and without
multi-token-prediction layers); an unknown family is counted as a Llama, which is near for decoders with
gated MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvstrata.cache.model_fields import ModelFields, model_fields
from kvstrata.cache.shapes import Kind, attention_heads, is_shared, layer_kinds
from kvstrata.errors import ConfigError, ModelError

# Bits a weight. MXFP4: 4-bit values and an 8-bit scale for each 32.
WEIGHT_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "mxfp4": 4.25, "int4": 4.0}
CONFIG_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a text decoder; `experts` are the routed experts' products, `other` all the rest."""

    experts: int
    other: int

    @property
    def total(self) -> int:
        return self.experts + self.other


@dataclass(frozen=True)
class Traits:
    """What a family's parameters have beyond the common fields.

    norms: norm vectors a layer of hidden size; norm_bias: a bias beside each. qk_norm: norms of head size for
    Q and K. qkv_bias, output_bias: where the family has them whatever `attention_bias` says. gated: three MLP
    products, else two. gate_heads: the Q projection also makes an output gate.
    """

    norms: int = 2
    norm_bias: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    tied: bool = False
    learned_positions: bool = False
    sinks: bool = False
    gate_heads: bool = False


LLAMA = Traits()
_GEMMA3 = Traits(norms=4, qk_norm=True, tied=True)
_QWEN3 = Traits(qk_norm=True)
_QWEN_HYBRID = Traits(qk_norm=True, gate_heads=True)
TRAITS: dict[str, Traits] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "deepseek_v2", "deepseek_v3", "kimi_k2"), LLAMA),
    "deepseek_v32": LLAMA,
    "qwen2": Traits(qkv_bias=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "gemma": Traits(tied=True),
    "gemma2": Traits(norms=4, tied=True),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA3,
    "gemma4_text": _GEMMA3,
    "gpt_oss": Traits(sinks=True),
    "falcon": Traits(norms=1, norm_bias=True, gated=False, tied=True),
    "gpt2": Traits(
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        tied=True,
        learned_positions=True,
    ),
}


def count_parameters(config: Mapping[str, Any]) -> ParameterCount:
    """Parameters of the text decoder that `config` (a parsed `config.json`) describes.

    Raises ModelError naming a field that is missing or wrong.
    """
    fields = model_fields(config)
    traits = TRAITS.get(fields.model_type, LLAMA)
    if fields.flag("attention_bias"):
        traits = replace(traits, qkv_bias=True, output_bias=True)
    hidden, vocabulary = fields.positive("hidden_size"), fields.positive("vocab_size")
    tied = fields.flag("tie_word_embeddings", traits.tied)
    norm = hidden * (2 if traits.norm_bias else 1)
    other = vocabulary * hidden * (1 if tied else 2) + norm
    if traits.learned_positions:
        other += fields.positive("max_position_embeddings") * hidden
    experts = 0
    for index, kind in enumerate(layer_kinds(fields)):
        other += _attention(fields, traits, kind, index) + traits.norms * norm
        layer_experts, layer_other = _mlp(fields, traits, index)
        experts += layer_experts
        other += layer_other
    return ParameterCount(experts=experts, other=other)


def weights_bytes(config: Mapping[str, Any], dtype: str = "auto") -> tuple[int, str]:
    """(bytes of all parameters, format name). dtype: one of WEIGHT_BITS, or `auto` for what `config` states.

    A quantised checkpoint keeps some parts wider; only MXFP4 (experts alone) is told apart.
    Raises ConfigError for an unknown dtype.
    """
    count = count_parameters(config)
    name = _stated_dtype(config) if dtype == "auto" else dtype
    if name not in WEIGHT_BITS:
        raise ConfigError(f"weights_dtype is {dtype!r}; choose one of auto, {', '.join(WEIGHT_BITS)}")
    other = "bf16" if name == "mxfp4" else name
    bits = count.experts * WEIGHT_BITS[name] + count.other * WEIGHT_BITS[other]
    return int(bits) // 8, name


def _stated_dtype(config: Mapping[str, Any]) -> str:
    fields = model_fields(config)
    quantization = fields.values.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method"))
        if method in WEIGHT_BITS:
            return method
        if quantization.get("bits") in (4, 8):
            return f"int{quantization['bits']}"
    return CONFIG_DTYPES.get(str(fields.values.get("dtype")), "bf16")


def _attention(fields: ModelFields, traits: Traits, kind: Kind, index: int) -> int:
    if kind == "latent":
        return _latent_attention(fields)
    if kind == "linear":
        return _linear_attention(fields)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    kv_heads, key_dim, value_dim = attention_heads(fields, kind, index)
    queries = heads * key_dim * (2 if traits.gate_heads else 1)
    keys, values = kv_heads * key_dim, kv_heads * value_dim
    if kind == "full" and fields.flag("attention_k_eq_v"):
        values = 0
    norms = 2 * key_dim if traits.qk_norm else 0
    if is_shared(fields, index):
        keys = values = 0
        norms //= 2
    count = hidden * (queries + keys + values) + heads * value_dim * hidden + norms
    if traits.qkv_bias:
        count += queries + keys + values
    if traits.output_bias:
        count += hidden
    return count + (heads if traits.sinks else 0)


def _latent_attention(fields: ModelFields) -> int:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1; V3.2's indexer as its published configuration has it."""
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    rope, rank = fields.positive("qk_rope_head_dim"), fields.positive("kv_lora_rank")
    nope, value = fields.positive("qk_nope_head_dim"), fields.positive("v_head_dim")
    queries = heads * (nope + rope)
    count = hidden * queries
    if fields.has("q_lora_rank"):
        query_rank = fields.positive("q_lora_rank")
        count = hidden * query_rank + query_rank + query_rank * queries
    count += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    if fields.has("index_head_dim"):
        index, index_heads = fields.positive("index_head_dim"), fields.positive("index_n_heads", 64)
        count += fields.positive("q_lora_rank") * index_heads * index
        count += hidden * index + 2 * index + hidden * index_heads
    return count


def _linear_attention(fields: ModelFields) -> int:
    """Gated DeltaNet as in Qwen3-Next: projections, short convolution, decay and step sizes, gated norm."""
    hidden = fields.positive("hidden_size")
    keys = fields.positive("linear_num_key_heads") * fields.positive("linear_key_head_dim")
    value_heads, value_dim = (
        fields.positive("linear_num_value_heads"),
        fields.positive("linear_value_head_dim"),
    )
    values = value_heads * value_dim
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    convolution = (2 * keys + values) * fields.positive("linear_conv_kernel_dim")
    return projections + convolution + 2 * value_heads + value_dim


def _mlp(fields: ModelFields, traits: Traits, index: int) -> tuple[int, int]:
    """(routed experts, everything else) of a layer's MLP."""
    hidden = fields.positive("hidden_size")
    products = 3 if traits.gated else 2
    if fields.has("intermediate_size"):
        inner = fields.positive("intermediate_size")
    elif not traits.gated:
        inner = 4 * hidden
    else:
        raise ModelError(f"the configuration (model_type {fields.model_type!r}) has no 'intermediate_size'")
    dense = products * hidden * inner
    if traits.mlp_bias or fields.flag("mlp_bias"):
        dense += (products - 1) * inner + hidden
    experts = fields.count("num_experts")
    if not experts or not _is_expert_layer(fields, index):
        return 0, dense
    width = fields.positive("moe_intermediate_size", inner)
    routed, router = experts * 3 * hidden * width, experts * hidden
    shared = fields.count("shared_expert_intermediate_size")
    if shared:
        return routed, router + 3 * hidden * shared + hidden
    if fields.flag("enable_moe_block"):  # Gemma-4: experts beside the dense MLP, three norms, router scales
        return routed, dense + router + 4 * hidden + experts
    if traits.sinks:  # gpt-oss: a bias in each product and in the router
        return routed + experts * (2 * width + hidden), router + experts
    return routed, router + fields.count("n_shared_experts") * 3 * hidden * width


def _is_expert_layer(fields: ModelFields, index: int) -> bool:
    if index < fields.count("first_k_dense_replace"):
        return False
    skipped = fields.indices("mlp_only_layers")
    return index not in skipped and (index + 1) % fields.positive("decoder_sparse_step", 1) == 0
