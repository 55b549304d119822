"""`kvstrata size`, over a configuration, a folder of weights, a GGUF file and bad input."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_configs import CONFIGS

from kvstrata.cli.app import main

CONTRACT = {"bytes_per_token", "bytes_per_sequence", "total_bytes", "sequences_that_fit", "weights_bytes"}


def write_config(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def sized(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code = main(["size", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main(["size", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return code, err


def test_json_has_the_contracts_fields_and_the_known_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, CONFIGS["llama-2-7b"])
    result = sized(capsys, path, "--batch", "32", "--length", "2048", "--kv-dtype", "fp16")
    assert result.keys() >= CONTRACT
    assert result["bytes_per_token"] == 524_288
    assert result["bytes_per_sequence"] == 2**30
    assert result["total_bytes"] == 34_359_738_368
    assert result["sequences_that_fit"] == 16  # in the default 16 GiB
    assert result["weights_bytes"] == 13_476_831_232
    assert result["sequences_that_fit_beside_weights"] == 3
    assert result["mha_factor"] == 1
    assert "34,359,738,368" in result["formula"]
    assert result["formats"][0]["kv_dtype"] == "fp16"
    assert len({row["kv_dtype"] for row in result["formats"]}) == 6


def test_layers_kept_in_a_higher_format_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, CONFIGS["llama-2-7b"])
    result = sized(capsys, path, "--kv-dtype", "int4", "--kv-dtype-skip-layers", "0,-1")
    vector = 2 * 32 * 128  # of K and V of all heads
    assert result["bytes_per_token"] == 30 * vector // 128 * (64 + 16) + 2 * vector * 2
    assert [(layer["kv_dtype"], layer["num_layers"]) for layer in result["layers"]] == [
        ("bf16", 2),
        ("int4", 30),
    ]
    plain = {row["kv_dtype"]: row["bytes_per_token"] for row in result["formats"]}
    assert plain["fp32"] == 32 * vector * 4  # bf16 would be a lower format there


@pytest.mark.parametrize(
    ("layers", "code", "message"),
    [
        ("0,x", 2, "it must be numbers of layers"),
        ("32", 1, "the model's are 0 to 31"),
        ("9,-50", 1, "has layer -50"),
    ],
)
def test_layers_that_are_none_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: str, code: int, message: str
) -> None:
    path = write_config(tmp_path, CONFIGS["llama-2-7b"])
    got, err = refused(capsys, path, "--kv-dtype-skip-layers", layers)
    assert got == code
    assert message in err


def test_people_see_formula_factor_and_weights_beside_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, CONFIGS["llama-3.1-8b"])
    assert main(["size", str(path), "--batch", "2", "--length", "8192"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes x 8,192 tokens x 2 sequences" in out
    assert "= 2,147,483,648 bytes (2 GiB)" in out
    assert "Saved against MHA over all tokens: 4.00 times" in out
    assert "Weights: 14.96 GiB (fp16, from the configuration), cache: 2 GiB" in out


def test_length_defaults_to_what_the_model_can_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sized(capsys, write_config(tmp_path, CONFIGS["gpt2"]))["length"] == 1024
    assert sized(capsys, write_config(tmp_path, CONFIGS["llama-3.1-8b"]))["length"] == 4096


def test_layers_are_told_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = sized(capsys, write_config(tmp_path, CONFIGS["gpt-oss-20b"]), "--length", "1000")
    window, full = result["layers"]
    assert (window["kind"], window["num_layers"], window["kept_tokens"]) == ("window", 12, 128)
    assert (full["kind"], full["num_layers"], full["kept_tokens"]) == ("full", 12, 1000)
    assert result["bytes_per_sequence"] == 12 * 2 * 8 * 64 * 2 * (128 + 1000)


def test_fp8_is_short_for_its_full_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, CONFIGS["llama-3.1-8b"])
    short, full = sized(capsys, path, "--kv-dtype", "fp8"), sized(capsys, path, "--kv-dtype", "fp8_e4m3")
    assert short == full
    assert short["bytes_per_token"] == 2 * 32 * 8 * 130


def test_block_size_rounds_up_what_the_pool_allocates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, CONFIGS["llama-2-7b"])
    result = sized(capsys, path, "--length", "1025", "--block-size", "1024", "--memory", "1GiB")
    assert result["bytes_per_sequence"] == 1025 * 524_288
    assert result["allocated_bytes_per_sequence"] == 2048 * 524_288
    assert result["sequences_that_fit"] == 1


def test_a_folder_with_shards_counts_its_tensors_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, CONFIGS["gpt2"])
    for number, tensors in ((1, 600), (2, 24)):
        header = b"{}      "
        body = struct.pack("<Q", len(header)) + header + bytes(tensors)
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(body)
    result = sized(capsys, tmp_path)
    assert (result["weights_bytes"], result["weights_source"]) == (624, "file")
    assert sized(capsys, tmp_path, "--weights-dtype", "int8")["weights_bytes"] == 124_439_808
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00003-of-00003.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    code, line = refused(capsys, tmp_path)
    assert code == 1
    assert "model-00003-of-00003.safetensors is missing" in line


def test_a_truncated_weight_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, CONFIGS["gpt2"])
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 5000) + b"{}")
    code, line = refused(capsys, tmp_path)
    assert code == 1
    assert "model.safetensors: truncated at 10 bytes" in line


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_sized_from_its_metadata_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "small.gguf")
    for model in (tmp_path / "small.gguf", tmp_path):
        result = sized(capsys, model)
        assert result["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
        assert result["length"] == 512
        assert (result["weights_bytes"], result["parameters"]) == (1280, 640)
        assert sized(capsys, model, "--weights-dtype", "int4")["weights_bytes"] == 320


def test_the_default_model_is_sized_from_its_file(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = sized(capsys, smollm2_path)
    assert result["bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert result["parameters"] == 134_515_008
    assert 0 < result["weights_bytes"] < smollm2_path.stat().st_size


def test_a_configuration_without_what_weights_need_still_sizes_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {key: value for key, value in CONFIGS["llama-2-7b"].items() if key != "vocab_size"}
    result = sized(capsys, write_config(tmp_path, config))
    assert result["bytes_per_token"] == 524_288
    assert result["weights_bytes"] is None
    assert any("vocab_size" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "holds a list"),
        ("{}", "model_type is None"),
        ('{"model_type": "mamba", "state_size": 16}', "not supported: state-space (Mamba) layers"),
        ('{"model_type": "llama"}', "has no 'num_hidden_layers'"),
    ],
)
def test_a_bad_configuration_fails_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, line = refused(capsys, path)
    assert code == 1
    assert message in line


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for model in (tmp_path / "notes.txt", tmp_path, tmp_path / "absent", "no-such-model"):
        code, line = refused(capsys, model)
        assert code == 1
        assert Path(model).name in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch"),
        (["--length", "0"], "--length"),
        (["--block-size", "-1"], "--block-size"),
        (["--kv-dtype", "fp9"], "'fp9'"),
        (["--weights-dtype", "fp9"], "'fp9'"),
        (["--memory", "much"], "'much'"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_usage_exits_two_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    path = write_config(tmp_path, CONFIGS["gpt2"])
    code, line = refused(capsys, path, *arguments)
    assert code == 2
    assert message in line
