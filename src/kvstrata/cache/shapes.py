"""What each layer of a model caches, from its configuration alone.

    full     K and V of every token (MHA, GQA, MQA: they differ only in the number of KV heads)
    window   K and V of the last `window` tokens
    latent   one latent vector a token, shared by all heads (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1):
             kv_lora_rank + qk_rope_head_dim elements; DeepSeek-V3.2's indexer keeps one more key of
             index_head_dim elements a token, which is counted as a second vector
    linear   a state of fixed size a sequence, whatever its length (Gated DeltaNet, arXiv 2412.06464)
    shared   nothing: the layer reads the K and V of an earlier layer

Other kinds (state-space, chunked, block-sparse layers) have no rule here and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvstrata.cache.model_fields import ModelFields, model_fields
from kvstrata.errors import ModelError

MAX_LAYERS = 10_000
Kind = Literal["full", "window", "latent", "linear", "shared"]
FULL: Kind = "full"
WINDOW: Kind = "window"
LINEAR: Kind = "linear"
LATENT: Kind = "latent"

LAYER_TYPES: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "linear_attention": "linear",
    "indexed_attention": "latent",
}

# Families whose layers all attend to everything, by the common field names; they ignore any `sliding_window`.
# fmt: off
PLAIN = frozenset(
    (
        "llama", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "falcon", "opt", "bloom", "codegen",
        "gemma", "phi", "stablelm", "granite", "granitemoe", "olmo", "olmo2", "olmoe", "cohere",
        "glm", "glm4", "smollm3", "mpt", "dbrx", "nemotron", "persimmon", "seed_oss", "ernie4_5",
        "hunyuan_v1_dense", "arcee", "apertus", "helium",
    )
)
# fmt: on
# Families whose `sliding_window`, where it is not null, holds in every layer.
WINDOW_EVERYWHERE = frozenset(
    ("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral3", "qwen3_moe")
)
# Families that slide in all but every n-th layer where neither `layer_types` nor a pattern is given.
WINDOW_PATTERN = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma4": 6,
    "gemma4_text": 6,
}
# Families that slide only with `use_sliding_window`, and then from layer `max_window_layers` on.
WINDOW_UPPER_LAYERS = frozenset(("qwen2", "qwen3"))
WINDOW_OPT_IN = WINDOW_UPPER_LAYERS | {"qwen2_moe", "qwen3_moe", "qwen3_next"}
LINEAR_HYBRIDS = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
LATENT_FAMILIES = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3", "glm4_moe_lite")
)

# Fields that only models with other kinds of layers have.
UNSUPPORTED_FIELDS = {
    "state_size": "state-space (Mamba)",
    "mamba_d_state": "state-space (Mamba)",
    "mamba_num_heads": "state-space (Mamba)",
    "ssm_cfg": "state-space (Mamba)",
    "hybrid_override_pattern": "state-space (Mamba)",
    "layers_block_type": "mixed recurrent",
    "block_types": "mixed recurrent",
    "lru_width": "recurrent (RG-LRU)",
    "rescale_every": "recurrent (RWKV)",
    "attn_layer_period": "state-space (Mamba)",
    "conv_L_cache": "short-convolution",
    "linear_attn_config": "linear-attention (Kimi Delta Attention)",
    "attn_type_list": "linear-attention (Lightning Attention)",
    "attention_chunk_size": "chunked-attention",
    "compress_ratios": "compressed-attention",
}


@dataclass(frozen=True)
class VectorSet:
    """`count` vectors of `dim` elements that a layer keeps of each token; a quantised format scales each."""

    count: int
    dim: int


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps.

    vectors: of each token. window: only the last so many tokens (None: all). state_bytes: bytes a sequence
    that do not grow. mha: the vectors a token would need with a K and a V for each query head.
    """

    kind: Kind
    vectors: tuple[VectorSet, ...]
    mha: tuple[VectorSet, ...]
    window: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True)
class CacheShape:
    """What a model caches. notes: what was assumed, for the reader. max_position: None where unknown."""

    model_type: str
    layers: tuple[LayerCache, ...]
    num_heads: int
    max_position: int | None
    notes: tuple[str, ...] = ()


def cache_shape(config: Mapping[str, Any]) -> CacheShape:
    """What each layer caches of a model whose `config.json` parses to `config`.

    Raises ModelError naming the field, or "not supported: ..." naming a kind of layer without a rule.
    """
    fields = model_fields(config)
    _refuse_unsupported(fields)
    kinds = layer_kinds(fields)
    notes = []
    if fields.defaulted:
        notes.append(f"not in the configuration, the library's default taken: {', '.join(fields.defaulted)}")
    if not _known(fields):
        notes.append(
            f"model_type {fields.model_type!r} is not known here: read by the common names, "
            "every layer taken to attend to all tokens"
        )
    layers = tuple(_layer(fields, kind, index) for index, kind in enumerate(kinds))
    if any(len(layer.vectors) == 2 for layer in layers if layer.kind == "latent"):
        notes.append("the indexer's key is counted beside the latent vector, in the same format")
    if fields.flag("attention_k_eq_v"):
        notes.append("K and V come from one projection but differ after norm and RoPE: both are counted")
    state = next((layer.state_bytes for layer in layers if layer.kind == "linear"), 0)
    if state:
        notes.append(
            f"linear-attention layers keep {state:,} bytes a sequence each, in no KV format: "
            "an fp32 matrix a value head and the convolution's last inputs in 16 bits"
        )
    position = fields.positive("max_position_embeddings") if fields.has("max_position_embeddings") else None
    heads = fields.positive("num_attention_heads")
    return CacheShape(fields.model_type, layers, heads, position, tuple(notes))


def layer_kinds(fields: ModelFields) -> tuple[Kind, ...]:
    """The kind of each layer, before sharing. Raises ModelError for kinds without a rule."""
    count = fields.positive("num_hidden_layers")
    if count > MAX_LAYERS:
        raise ModelError(f"num_hidden_layers is {count}; at most {MAX_LAYERS} are taken for real")
    if fields.has("kv_lora_rank"):
        if fields.model_type not in LATENT_FAMILIES:
            raise ModelError(
                f"not supported: layer kind 'latent' (kv_lora_rank) in model_type {fields.model_type!r}; "
                f"known for {', '.join(sorted(LATENT_FAMILIES))}"
            )
        return (LATENT,) * count
    kinds = _named_kinds(fields, count) if fields.has("layer_types") else _family_kinds(fields, count)
    if fields.model_type in WINDOW_OPT_IN and not fields.flag("use_sliding_window"):
        kinds = tuple(FULL if kind == WINDOW else kind for kind in kinds)
    if fields.model_type in ("gemma4", "gemma4_text"):
        kinds = (*kinds[:-1], FULL)  # the family's last layer always attends to all
    return kinds


def num_kv_heads(fields: ModelFields, index: int) -> int:
    """KV heads of layer `index`; a configuration may give one number or one for each layer."""
    heads = fields.positive("num_attention_heads")
    if fields.model_type in ("falcon", "gpt_bigcode"):
        # `multi_query` decides: the older Falcon files state num_kv_heads, and it is not used.
        if fields.flag("multi_query", True) and not fields.flag("new_decoder_architecture"):
            return 1
        return fields.positive("num_key_value_heads", heads)
    value = fields.values.get("num_key_value_heads")
    if isinstance(value, list):
        if index >= len(value) or not isinstance(value[index], int) or value[index] <= 0:
            raise ModelError(
                f"not supported: num_key_value_heads is {value!r}; each layer needs a number above zero"
            )
        return int(value[index])
    kv_heads = fields.positive("num_key_value_heads", heads)
    if kv_heads > heads or heads % kv_heads:
        raise ModelError(f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads, {heads}")
    return kv_heads


def head_dim(fields: ModelFields) -> int:
    """Elements of one head's key. Raises ModelError where it is not given and cannot be derived."""
    if fields.has("head_dim"):
        return fields.positive("head_dim")
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    if hidden % heads:
        raise ModelError(
            f"hidden_size is {hidden}; it is not a multiple of num_attention_heads, {heads}: give head_dim"
        )
    return hidden // heads


def attention_heads(fields: ModelFields, kind: Kind, index: int) -> tuple[int, int, int]:
    """(KV heads, elements of a key, elements of a value) of a layer that keeps K and V."""
    kv_heads, key_dim = num_kv_heads(fields, index), head_dim(fields)
    if fields.model_type in ("gemma4", "gemma4_text") and kind == "full":
        key_dim = fields.positive("global_head_dim")
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.positive("num_global_key_value_heads", kv_heads)
    return kv_heads, key_dim, fields.positive("v_head_dim", key_dim)


def is_shared(fields: ModelFields, index: int) -> bool:
    """Whether a layer reads the K and V of an earlier one (Gemma-3n, Gemma-4: the last layers)."""
    layers, shared = fields.positive("num_hidden_layers"), fields.count("num_kv_shared_layers")
    if shared >= layers:
        raise ModelError(
            f"num_kv_shared_layers is {shared}; it must be less than num_hidden_layers, {layers}"
        )
    return index >= layers - shared


def _layer(fields: ModelFields, kind: Kind, index: int) -> LayerCache:
    heads = fields.positive("num_attention_heads")
    if kind == "latent":
        rope = fields.positive("qk_rope_head_dim")
        vectors = [VectorSet(1, fields.positive("kv_lora_rank") + rope)]
        if fields.has("index_head_dim"):
            vectors.append(VectorSet(1, fields.positive("index_head_dim")))
        key_dim = fields.positive("qk_nope_head_dim") + rope
        mha = (VectorSet(heads, key_dim), VectorSet(heads, fields.positive("v_head_dim")))
        return LayerCache("latent", tuple(vectors), mha)
    kv_heads, key_dim, value_dim = attention_heads(fields, kind, index)
    mha = (VectorSet(heads, key_dim), VectorSet(heads, value_dim))
    if kind == "linear":
        return LayerCache("linear", (), mha, state_bytes=_linear_state_bytes(fields))
    if is_shared(fields, index):
        return LayerCache("shared", (), mha)
    window = fields.positive("sliding_window") if kind == "window" else None
    return LayerCache(kind, (VectorSet(kv_heads, key_dim), VectorSet(kv_heads, value_dim)), mha, window)


def _linear_state_bytes(fields: ModelFields) -> int:
    key_heads, key_dim = fields.positive("linear_num_key_heads"), fields.positive("linear_key_head_dim")
    value_heads, value_dim = (
        fields.positive("linear_num_value_heads"),
        fields.positive("linear_value_head_dim"),
    )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    inputs = fields.positive("linear_conv_kernel_dim") - 1  # the newest input is in the step itself
    return value_heads * key_dim * value_dim * 4 + channels * inputs * 2


def _named_kinds(fields: ModelFields, count: int) -> tuple[Kind, ...]:
    names = fields.values["layer_types"]
    if not isinstance(names, list) or len(names) != count:
        length = len(names) if isinstance(names, list) else names
        raise ModelError(
            f"layer_types has {length!r} entries; num_hidden_layers is {count}: give one a layer"
        )
    for name in names:
        if not isinstance(name, str) or name not in LAYER_TYPES:
            raise ModelError(
                f"not supported: layer kind {name!r}; those with a cache rule are {', '.join(LAYER_TYPES)}"
            )
    return tuple(LAYER_TYPES[name] for name in names)


def _family_kinds(fields: ModelFields, count: int) -> tuple[Kind, ...]:
    family = fields.model_type
    if family in LINEAR_HYBRIDS:
        interval = fields.positive("full_attention_interval")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
    if not fields.has("sliding_window") or family in PLAIN:
        return (FULL,) * count
    if fields.has("sliding_window_pattern") or family in WINDOW_PATTERN:
        pattern = fields.positive("sliding_window_pattern", WINDOW_PATTERN.get(family))
        return tuple(WINDOW if (i + 1) % pattern else FULL for i in range(count))
    if family in WINDOW_UPPER_LAYERS:
        first = fields.count("max_window_layers", count)
        return tuple(WINDOW if i >= first else FULL for i in range(count))
    if family in WINDOW_EVERYWHERE:
        return (WINDOW,) * count
    if not fields.flag("use_sliding_window", True):
        return (FULL,) * count
    raise ModelError(
        f"not supported: model_type {family!r} has sliding_window {fields.values['sliding_window']!r}, "
        "and no layer_types that say in which layers"
    )


def _known(fields: ModelFields) -> bool:
    known = PLAIN | WINDOW_EVERYWHERE | set(WINDOW_PATTERN) | WINDOW_OPT_IN | LINEAR_HYBRIDS | LATENT_FAMILIES
    return fields.model_type in known or fields.has("layer_types")


def _refuse_unsupported(fields: ModelFields) -> None:
    if fields.flag("is_encoder_decoder"):
        raise ModelError(
            f"not supported: model_type {fields.model_type!r} has an encoder and cross-attention layers"
        )
    for name, kind in UNSUPPORTED_FIELDS.items():
        if fields.has(name):
            raise ModelError(
                f"not supported: {kind} layers have no cache rule ({name}, model_type {fields.model_type!r})"
            )
