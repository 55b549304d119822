"""A GGUF file as a weight source: configuration, canonical names, row order, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    interleave,
    tiny_gguf,
    weights,
)

from kvstrata.errors import ModelError
from kvstrata.models.dequantize import dequantize
from kvstrata.models.gguf_source import GGUFSource
from kvstrata.models.rope import inverse_frequencies
from kvstrata.models.weights import expected_shapes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def llama_stored(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As a converter writes a llama model: q and k rows in adjacent pairs."""
    heads = {"q": HEADS, "k": KV_HEADS}
    return {
        name: interleave(data, heads[part])
        if (part := name.split(".")[2] if name.startswith("layers") else "") in heads
        else data
        for name, data in tensors.items()
    }


def test_llama_rows_come_in_half_rotation_order(path: Path) -> None:
    tensors = weights(1, bias=True)
    source = GGUFSource(tiny_gguf(path, tensors=llama_stored(tensors)))
    assert source.config.qkv_bias
    assert not source.config.output_bias
    assert set(source.names()) == set(tensors) == set(expected_shapes(source.config))
    for name, data in tensors.items():
        assert torch.equal(source.tensor(name), torch.from_numpy(data)), name
        raw = source.raw(name)
        rows = raw.data if raw.row_order is None else raw.data[raw.row_order]
        assert torch.equal(dequantize(rows, raw.format, raw.shape), torch.from_numpy(data)), name


def test_qwen_rows_stay_as_they_are(path: Path) -> None:
    tensors = weights(2, bias=True)
    source = GGUFSource(tiny_gguf(path, "qwen2", tensors))
    assert all(torch.equal(source.tensor(name), torch.from_numpy(data)) for name, data in tensors.items())
    assert source.raw("layers.0.q.weight").row_order is None


def test_llama_configuration(path: Path) -> None:
    config = GGUFSource(tiny_gguf(path)).config
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("llama", VOCAB, HIDDEN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.intermediate_size, config.num_layers, config.max_position) == (INNER, LAYERS, 128)
    assert config.tied_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.attention_scale == HEAD_DIM**-0.5
    assert {(layer.window, layer.rope.theta, layer.rope.kind) for layer in config.layers} == {
        (None, 10000.0, "default")
    }


def test_untied_head_is_found(path: Path) -> None:
    head = np.ones((VOCAB, HIDDEN), np.float32)
    source = GGUFSource(tiny_gguf(path, extra={"output.weight": head}))
    assert not source.config.tied_embeddings
    assert torch.equal(source.tensor("head.weight"), torch.from_numpy(head))


def test_sliding_window_of_a_mistral_holds_for_all_layers(path: Path) -> None:
    config = GGUFSource(tiny_gguf(path, llama__attention__sliding_window=16)).config
    assert [layer.window for layer in config.layers] == [16] * LAYERS


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, {"kind": "default", "factor": 1.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"kind": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position": 32,
                "beta_fast": 16.0,
                "attention_factor": None,
            },
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            {"attention_factor": pytest.approx(0.5 * (0.1 * np.log(4.0) + 1)), "original_max_position": 128},
        ),
    ],
)
def test_rope_scaling(path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = GGUFSource(tiny_gguf(path, **metadata)).config.layers[0].rope
    assert {key: getattr(rope, key) for key in expected} == expected


def test_llama3_factors_are_divisors_of_the_frequencies(path: Path) -> None:
    factors = np.array([1, 1, 2.5, 8], np.float32)
    source = GGUFSource(tiny_gguf(path, extra={"rope_freqs.weight": factors}))
    assert source.config.layers[0].rope.freq_factors == (1.0, 1.0, 2.5, 8.0)
    assert "rope_freqs.weight" not in set(source.names())
    plain = GGUFSource(tiny_gguf(path)).config.layers[0].rope
    expected = inverse_frequencies(plain, HEAD_DIM) / torch.from_numpy(factors).double()
    assert torch.equal(inverse_frequencies(source.config.layers[0].rope, HEAD_DIM), expected)


def tiny_gemma(path: Path, **metadata: Any) -> Path:
    tensors = weights(4, qk_norm=True, sandwich=True)
    return tiny_gguf(path, "gemma3", tensors, gemma3__attention__key_length=HEAD_DIM, **metadata)


def test_gemma3_configuration(path: Path) -> None:
    source = GGUFSource(
        tiny_gemma(
            path,
            gemma3__attention__sliding_window=8,
            gemma3__attention__sliding_window_pattern=2,
            gemma3__rope__freq_base=1e6,
            gemma3__rope__scaling__type="linear",
            gemma3__rope__scaling__factor=8.0,
        )
    )
    config = source.config
    local, last = config.layers
    assert (local.window, local.rope.theta, local.rope.kind) == (8, 10000.0, "default")
    assert (last.window, last.rope.theta, last.rope.kind, last.rope.factor) == (None, 1e6, "linear", 8.0)
    assert config.qk_norm
    assert config.sandwich_norms
    assert config.activation == "gelu_tanh"
    assert config.embedding_scale == HIDDEN**0.5
    norm = weights(4, qk_norm=True, sandwich=True)["layers.1.q_norm.weight"]
    assert torch.equal(source.tensor("layers.1.q_norm.weight"), torch.from_numpy(norm))  # no one is added


def test_gemma3_pattern_may_be_given_by_layer(path: Path) -> None:
    config = GGUFSource(
        tiny_gemma(
            path,
            gemma3__attention__sliding_window=8,
            gemma3__attention__sliding_window_pattern=[False, True],
            gemma3__rope__freq_base_swa=5000.0,
        )
    ).config
    assert [layer.window for layer in config.layers] == [None, 8]
    assert [layer.rope.theta for layer in config.layers] == [10000.0, 5000.0]


def test_every_end_token_of_the_metadata_ends_a_text(path: Path) -> None:
    named = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert GGUFSource(tiny_gguf(path, **named)).config.eos_token_ids == (2, 9)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"architecture": "mamba"},
        r"architecture 'mamba' is not supported; supported.*llama, qwen2, qwen3, gemma3",
    ),
    ({"llama.block_count": None}, r"llama\.block_count is missing"),
    ({"llama.block_count": 3}, r"tensor 'blk\.2\.attn_norm\.weight' is missing"),
    ({"llama.block_count": 4_000_000_000}, "more than 10000 layers"),
    ({"llama.embedding_length": 64}, r"'token_embd\.weight' has shape \(40, 32\), expected \(40, 64\)"),
    ({"llama.attention.head_count": 0}, "head_count is 0, expected an integer of at least 1"),
    ({"llama.attention.head_count": "four"}, "head_count is 'four', expected an integer"),
    ({"llama.attention.head_count_kv": 3}, "4 query heads are not a multiple of 3"),
    ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
    ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, other than the head dimension 8"),
    ({"llama.rope.freq_base": -1.0}, "freq_base is -1.0, expected a finite number above 0"),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope', not supported: none, linear and yarn"),
    ({"llama.expert_count": 8}, "mixtures of experts"),
    ({"split.count": 3}, "llama-gguf-split --merge"),
    ({"tokenizer.ggml.eos_token_id": 40}, "token id 40 is outside the vocabulary of 40"),
    (
        {"extra": {"blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32)}},
        r"'blk\.0\.attn_qkv\.weight' is not part",
    ),
    ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "3 RoPE frequency factors"),
    ({"extra": {"rope_freqs.weight": np.zeros(4, np.float32)}}, "factors not above 0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refusal_names_the_cause(path: Path, changes: dict[str, Any], message: str) -> None:
    tiny_gguf(path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        GGUFSource(path)
    assert str(path) in str(caught.value)


def test_missing_tensor_is_named(path: Path) -> None:
    tensors = weights()
    del tensors["layers.1.down.weight"]
    with pytest.raises(ModelError, match=r"tensor 'blk\.1\.ffn_down\.weight' is missing"):
        GGUFSource(tiny_gguf(path, tensors=tensors))
    with pytest.raises(ModelError, match=r"no tensor 'layers\.9\.q\.weight'"):
        GGUFSource(tiny_gguf(path)).tensor("layers.9.q.weight")


def test_unsupported_format_is_named(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("block_count", 1), ("context_length", 8), ("embedding_length", 256)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 256)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kind = gguf.GGMLQuantizationType.Q2_K
    writer.add_tensor("token_embd.weight", np.zeros((4, 84), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"'token_embd\.weight' has format Q2_K, which is not supported.*Q8_0"
    ):
        GGUFSource(path)


def test_default_model_loads(smollm2_path: Path) -> None:
    source = GGUFSource(smollm2_path)
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert source.raw("layers.3.q.weight").format == "Q4_1"
    assert source.raw("embed.weight").format == "Q8_0"
    assert 96_000_000 < source.nbytes() < smollm2_path.stat().st_size
    assert all(torch.isfinite(source.tensor(name)).all() for name in source.names() if "layers.1." in name)


def test_second_model_loads(gemma_path: Path) -> None:
    config = GGUFSource(gemma_path).config
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == [5, 11, 17]
    assert {layer.rope.theta for layer in config.layers if layer.window == 512} == {10000.0}
    assert (config.attention_scale, config.eos_token_ids) == (256**-0.5, (1,))
