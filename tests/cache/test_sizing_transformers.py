"""The sizing against what Transformers' own caches hold, for small random models of each kind."""

from typing import Any

import pytest
import torch

from kvstrata.cache.formats import format_named
from kvstrata.cache.shapes import cache_shape
from kvstrata.cache.sizing import cache_size

transformers = pytest.importorskip("transformers")

LENGTH = 24
WINDOW = 8
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "mha": {"model_type": "llama", **BASE},
    "gqa": {"model_type": "llama", **BASE, "num_key_value_heads": 2},
    "mqa": {**BASE, "model_type": "falcon", "num_kv_heads": 4, "multi_query": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
    },
    "head_dim": {"model_type": "qwen3", **BASE, "num_key_value_heads": 2, "head_dim": 16},
    "off": {
        "model_type": "qwen2",
        **BASE,
        "num_key_value_heads": 2,
        "sliding_window": WINDOW,
        "use_sliding_window": False,
    },
    "window": {"model_type": "mistral", **BASE, "num_key_value_heads": 2, "sliding_window": WINDOW},
    "gemma2": {
        "model_type": "gemma2",
        **BASE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **BASE,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **BASE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **BASE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
    },
    "mla": {
        "model_type": "deepseek_v3",
        **BASE,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
}


def cached_bytes(config: dict[str, Any]) -> int:
    """Bytes of the keys and values that Transformers holds after a forward over LENGTH tokens in fp32."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        out = model(torch.arange(LENGTH)[None] % 64, use_cache=True)
    cache = out.get("cache", out.get("past_key_values"))
    total = 0
    for layer in cache.layers:
        # A sliding layer keeps one token less than the window: the next is added before it is read.
        missing = 1 if getattr(layer, "is_sliding", False) else 0
        for tensor in (layer.keys, layer.values):
            total += tensor.numel() * 4 // tensor.shape[-2] * (tensor.shape[-2] + missing)
    return total


@pytest.mark.parametrize("name", MODELS)
def test_sizing_equals_what_transformers_holds(name: str) -> None:
    config = MODELS[name]
    size = cache_size(cache_shape(config), format_named("fp32"), length=LENGTH)
    assert size.bytes_per_sequence == cached_bytes(config)
