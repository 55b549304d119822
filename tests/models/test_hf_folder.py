"""A folder of safetensors as a weight source; what is damaged or pickled is refused by name."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import HIDDEN, VOCAB, hf_config, hf_folder, hf_name, weights

from kvstrata.errors import ModelError
from kvstrata.models.hf_folder import HFFolder
from kvstrata.models.safetensors_file import SafetensorsFile
from kvstrata.models.source import open_source
from kvstrata.models.weights import expected_shapes


def canonical(dtype: torch.dtype = torch.float32, **kinds: bool) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(data).to(dtype) for name, data in weights(5, **kinds).items()}


def stored(tensors: dict[str, torch.Tensor], base: str = "model.", *, gemma: bool = False) -> dict[str, Any]:
    return {hf_name(name, base, gemma=gemma): data for name, data in tensors.items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_as_they_were_saved(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    tensors = canonical(dtype)
    source = HFFolder(hf_folder(tmp_path, stored(tensors), hf_config(), shards))
    assert set(source.names()) == set(tensors) == set(expected_shapes(source.config))
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, data in tensors.items():
        assert torch.equal(source.tensor(name), data.to(torch.float32))
        assert source.tensor(name).dtype == torch.float32
        raw = source.raw(name)
        assert (raw.format, raw.shape) == (names[dtype], tuple(data.shape))
        assert raw.data.shape[0] == (data.shape[0] if data.dim() == 2 else 1)
        assert raw.data.tobytes() == data.contiguous().view(torch.uint8).numpy().tobytes()
    assert source.nbytes() == sum(data.nbytes for data in tensors.values())
    source.close()
    with pytest.raises(ModelError, match="closed"):
        source.tensor("embed.weight")


def test_untied_head_and_biases(tmp_path: Path) -> None:
    tensors = canonical(bias=True) | {"head.weight": torch.ones(VOCAB, HIDDEN)}
    config = hf_config("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=False)
    source = HFFolder(hf_folder(tmp_path, stored(tensors), config))
    assert torch.equal(source.tensor("head.weight"), tensors["head.weight"])
    assert torch.equal(source.tensor("layers.1.k.bias"), tensors["layers.1.k.bias"])


def test_saved_copy_of_a_tied_head_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    extra = {
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    source = HFFolder(hf_folder(tmp_path, stored(canonical()) | extra, hf_config()))
    assert "head.weight" not in set(source.names())


@pytest.mark.parametrize("base", ["model.", "model.language_model.", "language_model.model."])
def test_gemma_norms_get_their_one_under_every_prefix(tmp_path: Path, base: str) -> None:
    tensors = canonical(torch.bfloat16, qk_norm=True, sandwich=True)
    files = stored(tensors, base, gemma=True)
    text = hf_config("gemma3_text", "Gemma3ForCausalLM", sliding_window=8)
    config: dict[str, Any] = text
    if base != "model.":
        files["vision_tower.weight"] = torch.ones(2)
        files["model.multi_modal_projector.weight"] = torch.ones(2)
        config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    source = HFFolder(hf_folder(tmp_path, files, config))
    for name, data in tensors.items():
        expected = data.to(torch.float32) + (1.0 if name.endswith("norm.weight") else 0.0)
        assert torch.equal(source.tensor(name), expected), name
        if name.endswith("norm.weight"):
            assert source.raw(name).format == "F32"
            assert np.array_equal(source.raw(name).data.view(np.float32)[0], expected.numpy())


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    files = stored(canonical())
    del files["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        HFFolder(hf_folder(tmp_path, files, hf_config()))


def test_wrong_shape_format_and_unknown_tensor_are_named(tmp_path: Path) -> None:
    good, name = stored(canonical()), "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ModelError, match=rf"{re.escape(name)}' has shape \(32, 32\), expected \(64, 32\)"):
        HFFolder(hf_folder(tmp_path, good, hf_config(num_attention_heads=8, num_key_value_heads=2)))
    with pytest.raises(ModelError, match=f"{re.escape(name)}' has format F64, which is not supported"):
        HFFolder(hf_folder(tmp_path, good | {name: good[name].double()}, hf_config()))
    fused = {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(2)}
    with pytest.raises(ModelError, match=r"qkv_proj\.weight' is not part of a llama decoder"):
        HFFolder(hf_folder(tmp_path, good | fused, hf_config()))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    hf_folder(tmp_path, stored(canonical()), hf_config(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: this shard is missing"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", "model.bin", 3])
def test_index_may_only_name_files_beside_it(tmp_path: Path, shard: Any) -> None:
    hf_folder(tmp_path, stored(canonical()), hf_config(), shards=2)
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"expected a \.safetensors file name"):
        HFFolder(tmp_path)


def test_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    hf_folder(tmp_path, stored(canonical()), hf_config(), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    shards = sorted(set(weight_map.values()))
    moved = shards[1 - shards.index(weight_map["model.norm.weight"])]
    for name, shard in (("absent", shards[0]), ("model.norm.weight", moved)):
        path.write_text(json.dumps({"weight_map": weight_map | {name: shard}}))
        with pytest.raises(ModelError, match=f"{re.escape(shard)}: tensor {name!r} is missing"):
            HFFolder(tmp_path)


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_how_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    renamed = tmp_path / "model.gguf"
    renamed.write_bytes(pickle.dumps(Bomb()))
    for path in (tmp_path, tmp_path / name, renamed):
        with pytest.raises(ModelError, match=r"never loaded.*save_pretrained"):
            open_source(path)


def test_folder_without_weights_or_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        HFFolder(tmp_path)
    hf_folder(tmp_path, stored(canonical()), hf_config())
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        HFFolder(tmp_path)


def header(value: object, data: bytes = b"") -> bytes:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


FAULTS = {
    "empty": (b"", "at byte 0: truncated"),
    "length": (b"\xff" * 8, "at byte 0: header length is"),
    "json": (header(b"{]"), "at byte 9: the header is not JSON"),
    "utf-8": (header(b"\xff{}"), "at byte 8: the header is not UTF-8"),
    "not an object": (header([]), "at byte 8: the header is not a JSON object"),
    "nesting": (header(b"[" * 100_000), "at byte 8: the header is nested too deep"),
    "entry": (header({"t": 1}), "at byte 8: the header's entry of 't' is not an object"),
    "shape": (header(entry(shape=[-2])), "lacks a dtype, shape or data_offsets"),
    "offsets": (header(entry(data_offsets=[0])), "lacks a dtype, shape or data_offsets"),
    "extent": (header(entry(), b"\0" * 7), "tensor 't' ends at byte 77, past the end of the file"),
    "size": (header(entry(shape=[3]), b"\0" * 8), "at byte 69: tensor 't': 8 bytes are not F32"),
    "reversed": (header(entry(data_offsets=[8, 0]), b"\0" * 8), "tensor 't': -8 bytes are not F32"),
    "trailing bytes": (header(entry(), b"\0" * 12), "not a valid safetensors file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_safetensors_names_file_and_offset(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = hf_folder(tmp_path, stored(canonical()), hf_config()) / "model.safetensors"
    content = path.read_bytes()
    for cut in [*range(0, len(content), 1009), len(content) - 1]:
        path.write_bytes(content[:cut])
        with pytest.raises(ModelError, match=re.escape(str(path))):
            HFFolder(tmp_path)


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = hf_folder(tmp_path_factory.mktemp("fuzz"), stored(canonical()), hf_config())
    (folder / "model.safetensors").rename(folder / "good")
    return folder


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_header_is_a_model_error_or_harmless(fuzz_folder: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray((fuzz_folder / "good").read_bytes())
    for position, value in flips:
        content[position] = value
    (fuzz_folder / "model.safetensors").write_bytes(content)
    message = str(fuzz_folder)
    try:
        source = HFFolder(fuzz_folder)
        assert all(source.tensor(name).numel() > 0 for name in source.names())
    except ModelError as error:
        message = str(error)
    assert message.startswith(str(fuzz_folder))
