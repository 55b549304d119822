"""Settings: what is right passes, what is wrong is named with its value and what would do."""

import math
from pathlib import Path

import pytest

from kvstrata import EngineConfig, RequestOptions, SamplingParams
from kvstrata.config import layers_of, parse_bytes
from kvstrata.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("512M", 512_000_000),
        ("1.5gb", 1_500_000_000),
        ("64 kib", 65_536),
        ("7", 7),
        (12, 12),
    ],
)
def test_sizes_with_units(text: str | int, expected: int) -> None:
    assert parse_bytes(text, "size") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 parsecs", "0", "0.1", 0, -5, "1e9", "inf"])
def test_sizes_that_are_none_name_the_field(text: str | int) -> None:
    with pytest.raises(ConfigError, match="kv_memory is"):
        parse_bytes(text, "kv_memory")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; choose one of auto, cpu, cuda"),
        ({"block_size": 0}, "block_size is 0; it must be a whole number from 1"),
        ({"block_size": True}, "block_size is True"),
        ({"kv_dtype": "int3"}, "kv_dtype is 'int3'; choose one of"),
        (
            {"kv_dtype_skip_layers": "0,x"},
            "kv_dtype_skip_layers is '0,x'; it must be numbers of layers such as 0,1",
        ),
        ({"kv_dtype_skip_layers": "0,,1"}, "kv_dtype_skip_layers is '0,,1'"),
        ({"kv_dtype_skip_layers": [0.5]}, "kv_dtype_skip_layers is"),
        ({"kv_dtype_skip_layers": 3}, "kv_dtype_skip_layers is 3"),
        ({"kv_dtype_skipped": "int3"}, "kv_dtype_skipped is 'int3'; choose one of"),
        ({"policy": "ttl"}, "ttl is None; policy ttl needs it"),
        ({"ttl": -1.0}, "ttl is -1.0"),
        ({"ttl": math.nan}, "ttl is nan"),
        ({"threads": 0}, "threads is 0"),
        ({"kv_memory": "lots"}, "kv_memory is 'lots'; give a size such as 4GiB"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"threads": 10**11}, "threads is 100000000000; it must be a whole number from 1 to 1024"),
        ({"ttl": 10**400}, "ttl is 1000"),
        ({"kv_memory": "9" * 500}, "kv_memory is '999"),
        ({"model": 5}, "model is 5; it must be text"),
        ({"model": ""}, "model is ''; it must be text"),
        ({"chat_template": b"x"}, "chat_template is b'x'; it must be text"),
        ({"prefix_caching": "no"}, "prefix_caching is 'no'; it must be True or False"),
        ({"draft": "bigram"}, "draft is 'bigram'; give ngram, or layers:K"),
        ({"draft": "layers:0"}, "draft is 'layers:0'; give ngram, or layers:K"),
        ({"draft": 5}, "draft is 5; give ngram, or layers:K"),
        ({"draft": "ngram", "draft_model": "x.gguf"}, "draft_model is 'x.gguf'; and draft is 'ngram'"),
        ({"draft_model": ""}, "draft_model is ''; it must be text"),
        ({"draft_tokens": 0}, "draft_tokens is 0; it must be a whole number from 1 to 64"),
        ({"draft_adaptive": "no"}, "draft_adaptive is 'no'; it must be True or False"),
    ],
)
def test_engine_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["0, 1,-1", [0, 1, -1], (0, 1, -1)])
def test_layers_to_skip_are_numbers_that_may_count_from_the_end(given: object) -> None:
    config = EngineConfig(kv_dtype_skip_layers=given)  # type: ignore[arg-type]
    assert config.kv_dtype_skip_layers == (0, 1, -1)
    assert layers_of((0, 1, -1, 29), 30) == {0, 1, 29}


@pytest.mark.parametrize("layer", [30, -31])
def test_a_layer_that_the_model_lacks_is_named_with_those_it_has(layer: int) -> None:
    with pytest.raises(ConfigError, match=rf"has layer {layer}; the model's are 0 to 29, or -30 to -1"):
        layers_of((0, layer), 30)


def test_all_layers_cannot_be_skipped() -> None:
    with pytest.raises(ConfigError, match=r"has all 3 layers.*set kv_dtype itself"):
        layers_of((0, 1, -1), 3)


def test_the_layers_to_propose_with_are_a_number() -> None:
    assert EngineConfig(draft="layers:12").draft_layers == 12
    assert EngineConfig(draft="ngram").draft_layers is None
    assert EngineConfig().draft_layers is None


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="kv_mem is 1; no such setting; the settings are model, device"):
        EngineConfig.from_mapping({"kv_mem": 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be a number above 0 to 1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 20}, "min_tokens is 20; it must be a whole number from 0 to 16"),
        ({"stop": ["a", ""]}, "stop is .*; it must be one to sixteen texts"),
        ({"stop": [3]}, "stop is"),
        ({"stop": ["a" * 4000, "b" * 97]}, "stop has 4097 characters; its texts may have 4096 in all"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300; it must be a number from 0.01"),
        ({"stop": 5}, "stop is 5"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids is"),
        ({"ignore_eos": "false"}, "ignore_eos is 'false'; it must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
    ],
)
def test_sampling_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"priority": 1.5}, "priority is 1.5"),
        ({"ttl": 0}, "ttl is 0"),
        ({"cache_salt": 5}, "cache_salt is 5"),
        ({"cache_salt": "\ud800"}, "cache_salt is .*; it must be valid text"),
    ],
)
def test_request_options(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RequestOptions(**settings)  # type: ignore[arg-type]


def test_no_stop_tokens_can_be_told_by_none() -> None:
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


def test_a_model_can_be_given_as_a_path() -> None:
    assert EngineConfig(model=Path("folder") / "model.gguf").model == str(Path("folder") / "model.gguf")  # type: ignore[arg-type]


def test_one_stop_text_or_several() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop_strings == ("x", "yz")
    assert SamplingParams().stop_strings == ()
