"""What is taken off the keys: the same in every process, worth taking off, and nothing to a softmax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvstrata.kernels import kv_formats
from kvstrata.models import key_offset
from kvstrata.models.decoder import Decoder
from kvstrata.models.key_offset import measure_key_offsets
from kvstrata.models.source import load_tokenizer, open_source

CPU = torch.device("cpu")
HANDBOOK = Path(__file__).parents[2] / "src/kvstrata/cli/demo_handbook.txt"


Model = tuple[Decoder, Callable[[str], list[int]]]


@pytest.fixture(scope="module", params=["smollm2_path", "gemma_path"])
def model(request: pytest.FixtureRequest) -> Model:
    path = request.getfixturevalue(request.param)
    source = open_source(path)
    try:
        return Decoder.load(source, weights="auto", device=CPU), load_tokenizer(source, path).encode
    finally:
        source.close()


def test_offsets_are_those_of_the_layers_asked_for_and_repeat(model: Model) -> None:
    first, again = (measure_key_offsets(*model, [0, 5]) for _ in range(2))
    assert first.keys() == {0, 5}
    config = model[0].config
    for layer, offset in first.items():
        assert offset.shape == (config.num_kv_heads, config.head_dim)
        assert torch.equal(offset, again[layer])
        grid = 2.0 ** (offset.abs().max().log2().floor() - 4)
        assert torch.equal((offset / grid).round() * grid, offset)
    assert measure_key_offsets(*model, []) == {}


def test_keys_without_their_offset_lose_less_in_four_bits(model: Model) -> None:
    decoder, encode = model
    offsets = measure_key_offsets(decoder, encode, range(decoder.config.num_layers))
    keys = key_offset._keys(decoder, encode(HANDBOOK.read_text())[:300])  # another text than the offsets' own

    def lost(x: torch.Tensor) -> float:
        read = kv_formats.dequantise(*kv_formats.quantise(x, torch.uint8, key=True))
        return float((read - kv_formats.rotate(x)).square().sum())

    plain = sum(lost(keys[layer].contiguous()) for layer in offsets)
    centred = sum(lost(keys[layer] - offset) for layer, offset in offsets.items())
    assert centred < 0.8 * plain


def test_a_model_whose_keys_are_no_numbers_has_no_offsets(smollm2_path: Path) -> None:
    source = open_source(smollm2_path)
    decoder = Decoder.load(source, weights="fp32", device=CPU)
    encode = load_tokenizer(source, smollm2_path).encode
    source.close()
    decoder._weights.layers[3].attn_norm.fill_(torch.nan)
    offsets = measure_key_offsets(decoder, encode, [2, 3, 4])
    assert offsets[2].abs().max() > 0
    assert torch.equal(offsets[3], torch.zeros_like(offsets[3]))
