"""A config.json as a DecoderConfig, in the forms of Transformers 4 and 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import HEAD_DIM, LAYERS, hf_config

from kvstrata.errors import ModelError
from kvstrata.models.config import DecoderConfig, RopeConfig
from kvstrata.models.hf_config import decoder_config, read_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 8.0, original_max_position=64)


def config(
    model_type: str = "llama", architecture: str = "LlamaForCausalLM", **changes: Any
) -> DecoderConfig:
    return decoder_config(hf_config(model_type, architecture, **changes), "config.json")


def windows(of: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in of.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": 500000, "rope_scaling": None}, RopeConfig(500000.0)),
        ({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            RopeConfig(10000.0, "yarn", 4.0, original_max_position=32),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "attention_factor": 0.9,
                    "mscale": 0.7,
                    "mscale_all_dim": 0,
                    "truncate": False,
                }
            },
            RopeConfig(
                1e6,
                "yarn",
                4.0,
                original_max_position=128,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=0.9,
                mscale=0.7,
                truncate=False,
            ),
        ),
    ],
)
def test_rope_of_a_llama(changes: dict[str, Any], expected: RopeConfig) -> None:
    assert {layer.rope for layer in config(**changes).layers} == {expected}


def test_biases() -> None:
    plain = config()
    assert (plain.qkv_bias, plain.output_bias, plain.mlp_bias) == (False, False, False)
    biased = config(attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    qwen2 = config("qwen2", "Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    qwen3 = config("qwen3", "Qwen3ForCausalLM")
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)


def test_mistral_slides_in_all_layers_unless_null() -> None:
    assert windows(config("mistral", "MistralForCausalLM", sliding_window=16)) == [16] * LAYERS
    assert windows(config("mistral", "MistralForCausalLM", sliding_window=None)) == [None] * LAYERS
    assert windows(config("mistral", "MistralForCausalLM")) == [4096] * LAYERS


def test_qwen_slides_only_where_it_says_so() -> None:
    off = config("qwen2", "Qwen2ForCausalLM", sliding_window=16, max_window_layers=1)
    assert windows(off) == [None, None]
    on = config("qwen2", "Qwen2ForCausalLM", sliding_window=16, max_window_layers=1, use_sliding_window=True)
    assert windows(on) == [None, 16]
    kinds = ["sliding_attention", "full_attention"]
    by_type = config(
        "qwen3", "Qwen3ForCausalLM", sliding_window=16, use_sliding_window=True, layer_types=kinds
    )
    assert windows(by_type) == [16, None]


def test_gemma3_old_and_new_forms_agree() -> None:
    common = {"sliding_window": 8, "query_pre_attn_scalar": 24}
    old = config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        **common,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=10000,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        **common,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    assert old == new
    assert windows(old) == [8, None]
    assert [layer.rope for layer in old.layers] == [RopeConfig(10000.0), RopeConfig(1e6, "linear", 8.0)]
    assert old.attention_scale == 24**-0.5
    assert old.activation == "gelu_tanh"
    assert old.sandwich_norms
    assert old.qk_norm
    assert old.embedding_scale == old.hidden_size**0.5


def test_multimodal_gemma3_is_its_text_part() -> None:
    text = hf_config("gemma3_text", sliding_window=8)
    for key in ("architectures", "tie_word_embeddings", "eos_token_id"):
        del text[key]
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 9999},
        "eos_token_id": [1, 10],
    }
    found = decoder_config(whole, "config.json")
    assert (found.hidden_size, found.tied_embeddings, found.eos_token_ids) == (
        text["hidden_size"],
        True,
        (1, 10),
    )


def test_end_ids_join_those_of_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_config(tmp_path).eos_token_ids == (2, 7)


def test_null_and_absent_head_fields() -> None:
    values = hf_config(num_key_value_heads=None, head_dim=None)
    found = decoder_config(values, "config.json")
    assert (found.num_kv_heads, found.head_dim) == (found.num_heads, HEAD_DIM)
    del values["architectures"]
    assert decoder_config(values, "config.json") == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["PhiForCausalLM"]},
            "'PhiForCausalLM' is not supported; supported are LlamaForCausalLM",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic', which is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope', which is not supported"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial RoPE is not supported"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors are not supported"),
        ({"hidden_size": "big"}, "hidden_size is 'big', expected an integer"),
        ({"hidden_size": -1}, "hidden_size is -1, expected an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "more than 10000 layers"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"num_key_value_heads": 3}, "not a multiple of 3"),
        ({"head_dim": 7}, "head dimension 7 is odd"),
        ({"eos_token_id": 999}, "token id 999 is outside the vocabulary"),
    ],
)
def test_refusal_names_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        config(**changes)
    assert str(caught.value).startswith("config.json: ")


def test_layer_types_must_fit() -> None:
    with pytest.raises(ModelError, match="layer_types"):
        config("gemma3_text", "Gemma3ForCausalLM", layer_types=["full_attention"])
    with pytest.raises(ModelError, match="layer_types"):
        config("gemma3_text", "Gemma3ForCausalLM", layer_types=["full_attention", "linear_attention"])


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000], ids=["cut", "list", "binary", "nested"]
)
def test_damaged_config_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


PUBLIC = {  # name: (layers, heads, KV heads, head_dim, windows in use, RoPE kinds, tied)
    "Llama-2-7B": (32, 32, 32, 128, {None}, {"default"}, False),
    "Llama-2-70B": (80, 64, 8, 128, {None}, {"default"}, False),
    "Llama-3.1-8B": (32, 32, 8, 128, {None}, {"llama3"}, False),
    "Llama-3.2-1B": (16, 32, 8, 64, {None}, {"llama3"}, True),
    "Mistral-7B-v0.1": (32, 32, 8, 128, {4096}, {"default"}, False),
    "Qwen2.5-7B-Instruct": (28, 28, 4, 128, {None}, {"default"}, False),
    "Qwen3-0.6B": (28, 16, 8, 128, {None}, {"default"}, True),
    "Qwen3-32B": (64, 64, 8, 128, {None}, {"default"}, False),
    "SmolLM2-135M": (30, 9, 3, 64, {None}, {"default"}, True),
    "TinyLlama-1.1B-Chat-v1.0": (22, 32, 4, 64, {None}, {"default"}, False),
    "gemma-3-1b-it": (26, 4, 1, 256, {None, 512}, {"default"}, True),
    "gemma-3-4b-it": (34, 8, 4, 256, {None, 1024}, {"default", "linear"}, True),
    "gemma-3-27b-it": (62, 32, 16, 128, {None, 1024}, {"default", "linear"}, True),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configuration(shared_data: Path, name: str) -> None:
    layers, heads, kv_heads, head_dim, expected_windows, kinds, tied = PUBLIC[name]
    found = read_config(shared_data / "data" / "configs" / name)
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim) == (
        layers,
        heads,
        kv_heads,
        head_dim,
    )
    assert set(windows(found)) == expected_windows
    assert {layer.rope.kind for layer in found.layers} == kinds
    assert found.tied_embeddings == tied
    scale = 168 if name == "gemma-3-27b-it" else head_dim
    assert found.attention_scale == pytest.approx(scale**-0.5)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mixtral-8x7B-v0.1", "gemma-2-2b", "gpt2", "Qwen3-30B-A3B"])
def test_public_configuration_of_another_architecture_is_refused(shared_data: Path, name: str) -> None:
    with pytest.raises(ModelError, match="is not supported; supported are"):
        read_config(shared_data / "data" / "configs" / name)
