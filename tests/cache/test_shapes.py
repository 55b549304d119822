"""What each kind of model caches, read from its configuration."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from model_configs import CONFIGS, PARAMETERS, PER_TOKEN_BF16, SHARED_PER_TOKEN_BF16

from kvstrata.cache.formats import format_named
from kvstrata.cache.gguf_fields import config_from_gguf
from kvstrata.cache.parameters import count_parameters, weights_bytes
from kvstrata.cache.shapes import CacheShape, VectorSet, cache_shape
from kvstrata.cache.sizing import cache_size
from kvstrata.errors import ConfigError, KVStrataError, ModelError

BF16 = format_named("bf16")


def per_token(shape: CacheShape) -> int:
    return cache_size(shape, BF16, length=1).bytes_per_token


def kinds(shape: CacheShape) -> dict[str, int]:
    return dict(Counter(layer.kind for layer in shape.layers))


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_a_token_are_those_worked_out_by_hand(name: str) -> None:
    assert per_token(cache_shape(CONFIGS[name])) == PER_TOKEN_BF16[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_published_checkpoint(name: str) -> None:
    assert count_parameters(CONFIGS[name]).total == PARAMETERS[name]


@pytest.mark.parametrize("name", SHARED_PER_TOKEN_BF16)
def test_every_shared_configuration_is_sized_right(name: str, shared_data: Path) -> None:
    path = shared_data / "data" / "configs" / name / "config.json"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    shape = cache_shape(json.loads(path.read_text()))
    size = cache_size(shape, BF16, length=100_000)
    assert (size.bytes_per_token, size.bytes_per_token_past_windows) == SHARED_PER_TOKEN_BF16[name]
    assert size.mha_factor >= 1


def test_no_shared_configuration_is_left_out(shared_data: Path) -> None:
    folder = shared_data / "data" / "configs"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(SHARED_PER_TOKEN_BF16)


def test_multi_query_makes_falcons_stated_kv_heads_one() -> None:
    assert cache_shape(CONFIGS["falcon-7b"]).layers[0].vectors == (VectorSet(1, 64), VectorSet(1, 64))
    new = {**CONFIGS["falcon-7b"], "new_decoder_architecture": True, "hidden_size": 8192}
    new |= {"num_attention_heads": 128, "num_kv_heads": 8}
    assert cache_shape(new).layers[0].vectors[0] == VectorSet(8, 64)


def test_library_defaults_fill_in_and_are_told() -> None:
    shape = cache_shape(CONFIGS["gemma-3-4b"])
    assert shape.num_heads == 8
    assert shape.layers[5].vectors[0] == VectorSet(4, 256)
    assert "num_attention_heads" in shape.notes[0]


def test_gemma_slides_in_all_but_every_nth_layer() -> None:
    third = cache_shape(CONFIGS["gemma-3-4b"])
    assert [i for i, layer in enumerate(third.layers) if layer.window is None] == [5, 11, 17, 23, 29]
    second = cache_shape(CONFIGS["gemma-2-2b"])
    assert [layer.window for layer in second.layers[:4]] == [4096, None, 4096, None]


def test_a_sliding_window_switched_off_hides_nothing() -> None:
    config = CONFIGS["qwen2.5-7b"]
    assert kinds(cache_shape(config)) == {"full": 28}
    upper = {**config, "use_sliding_window": True, "max_window_layers": 20}
    assert kinds(cache_shape(upper)) == {"full": 20, "window": 8}


def test_a_null_window_differs_from_an_absent_one() -> None:
    config = CONFIGS["mistral-7b-v0.1"]
    assert kinds(cache_shape({**config, "sliding_window": None})) == {"full": 32}
    absent = {key: value for key, value in config.items() if key != "sliding_window"}
    assert cache_shape(absent).layers[0].window == 4096


def test_mla_keeps_one_latent_vector_whatever_the_heads() -> None:
    lite = CONFIGS["deepseek-v2-lite"]
    for heads in (16, 128):
        shape = cache_shape({**lite, "num_attention_heads": heads, "num_key_value_heads": heads})
        assert shape.layers[0].vectors == (VectorSet(1, 576),)


def test_the_indexers_key_is_counted_beside_the_latent() -> None:
    shape = cache_shape(CONFIGS["deepseek-v3.2"])
    assert shape.layers[0].vectors == (VectorSet(1, 576), VectorSet(1, 128))
    assert any("indexer" in note for note in shape.notes)


def test_linear_layers_keep_a_state_that_does_not_grow() -> None:
    shape = cache_shape(CONFIGS["qwen3-next-80b-a3b"])
    assert kinds(shape) == {"linear": 36, "full": 12}
    assert [layer.kind for layer in shape.layers[:4]] == ["linear"] * 3 + ["full"]
    short, long = (cache_size(shape, BF16, length=n) for n in (1, 1001))
    assert short.state_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert long.bytes_per_sequence - short.bytes_per_sequence == 1000 * 24_576


def test_gemma_4_full_layers_have_their_own_heads_and_size() -> None:
    shape = cache_shape(CONFIGS["gemma-4-26b-a4b"])
    assert shape.layers[0].vectors == (VectorSet(8, 256), VectorSet(8, 256))
    assert shape.layers[5].vectors == (VectorSet(2, 512), VectorSet(2, 512))


def test_layers_that_share_keep_nothing_of_their_own() -> None:
    config = CONFIGS["gemma-4-26b-a4b"]["text_config"]
    shared = cache_shape({**config, "num_kv_shared_layers": 12})
    assert kinds(shared) == {"window": 15, "full": 3, "shared": 12}
    assert per_token(shared) == 15 * 8192 + 3 * 4096
    with pytest.raises(ModelError, match="num_kv_shared_layers is 30"):
        cache_shape({**config, "num_kv_shared_layers": 30})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "mamba"]}, "not supported: layer kind 'mamba'"),
        ({"mamba_d_state": 16}, "not supported: state-space .*mamba_d_state"),
        ({"attention_chunk_size": 8192}, "not supported: chunked-attention"),
        ({"is_encoder_decoder": True}, "not supported: .*encoder"),
        ({"model_type": "brand_new", "sliding_window": 5}, "not supported: .*layer_types"),
        ({"kv_lora_rank": 512}, "not supported: layer kind 'latent'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_attention_heads": "8"}, "num_attention_heads is '8'"),
        ({"num_attention_heads": 5}, "hidden_size is 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads is \\[2\\]"),
        ({"model_type": None}, "model_type is None"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(KVStrataError, match=message):
        cache_shape({**config, **changes})


def test_an_unknown_family_is_read_by_the_common_names_and_says_so() -> None:
    shape = cache_shape(
        {"model_type": "brand_new", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    )
    assert per_token(shape) == 2 * 2 * 4 * 16 * 2
    assert any("brand_new" in note for note in shape.notes)


def test_kv_heads_may_be_given_a_layer() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = cache_shape({**config, "num_key_value_heads": [1, 2]})
    assert [layer.vectors[0].count for layer in shape.layers] == [1, 2]


def test_weights_follow_the_stated_or_the_asked_format() -> None:
    assert weights_bytes(CONFIGS["llama-2-7b"]) == (2 * 6_738_415_616, "fp16")
    assert weights_bytes(CONFIGS["llama-2-7b"], "int4") == (6_738_415_616 // 2, "int4")
    size, name = weights_bytes(CONFIGS["gpt-oss-20b"])
    assert name == "mxfp4"
    assert size == pytest.approx(13_761_264_768, rel=0.01)  # the published checkpoint's bytes
    with pytest.raises(ConfigError, match="weights_dtype is 'fp7'"):
        weights_bytes(CONFIGS["llama-2-7b"], "fp7")


GGUF_GEMMA3 = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "tokenizer.ggml.tokens": ["a", "b"],
}


def test_gguf_metadata_gives_the_same_shape_as_a_config() -> None:
    config = config_from_gguf(GGUF_GEMMA3)
    assert config["vocab_size"] == 2
    assert kinds(cache_shape(config)) == {"window": 15, "full": 3}
    assert per_token(cache_shape(config)) == 2 * 18 * 256 * 2


def test_gguf_layer_pattern_and_heads_a_layer_are_followed() -> None:
    metadata = {
        "general.architecture": "gemma4",
        "gemma4.block_count": 6,
        "gemma4.embedding_length": 2816,
        "gemma4.attention.head_count": 16,
        "gemma4.attention.head_count_kv": [8, 8, 8, 8, 8, 2],
        "gemma4.attention.key_length": 512,
        "gemma4.attention.value_length": 512,
        "gemma4.attention.key_length_swa": 256,
        "gemma4.attention.value_length_swa": 256,
        "gemma4.attention.sliding_window": 1024,
        "gemma4.attention.sliding_window_pattern": [True] * 5 + [False],
    }
    assert per_token(cache_shape(config_from_gguf(metadata))) == 5 * 8192 + 4096


def test_gguf_latent_models_are_told_from_their_key_length() -> None:
    metadata = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 27,
        "deepseek2.embedding_length": 2048,
        "deepseek2.attention.head_count": 16,
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": 576,
        "deepseek2.attention.value_length": 512,
        "deepseek2.attention.key_length_mla": 192,
        "deepseek2.attention.value_length_mla": 128,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    shape = cache_shape(config_from_gguf(metadata))
    assert per_token(shape) == 31_104
    assert shape.layers[0].mha == (VectorSet(16, 192), VectorSet(16, 128))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "general.architecture is None"),
        ({"general.architecture": "mamba", "mamba.ssm.state_size": 16}, "not supported: recurrent"),
        (
            {"general.architecture": "deepseek32", "deepseek32.attention.indexer.key_length": 128},
            "not supported: indexer",
        ),
        ({"general.architecture": "llama"}, "num_hidden_layers"),
    ],
)
def test_gguf_files_without_a_rule_are_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cache_shape(config_from_gguf(metadata))
