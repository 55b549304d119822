"""`kvstrata quality`: perplexity of a text, through the engine as it serves requests."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged import PagedRun

from kvstrata.engine.quality import Quality, windows
from kvstrata.errors import ConfigError
from kvstrata.kernels import backend
from kvstrata.models.decoder import Decoder
from kvstrata.models.source import load_tokenizer, open_source

POOL = ("--kv-memory", "128MiB")
TEXT = "The lighthouse keeper counts the ships that pass by night, and writes their names into the book. " * 3


def quality(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstrata", "quality", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_perplexity_is_that_of_the_decoder_window_by_window(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    done = quality("--text", str(file), "--window", "24", "--weights", "fp32", "--kv-dtype", "fp32", *POOL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)

    source = open_source(smollm2_path)
    tokenizer = load_tokenizer(source, smollm2_path)
    decoder = Decoder.load(source, weights="fp32", device=torch.device("cpu"))
    source.close()
    pieces = windows(tokenizer.encode(TEXT, add_special_tokens=False), 24, tokenizer.prefix_ids)
    losses = []
    for piece in pieces:
        [logprobs] = PagedRun(decoder, [len(piece)]).step([piece])
        losses += [-float(row[token]) for row, token in zip(logprobs, piece[1:], strict=False)]
    assert len(pieces) > 1
    assert result["tokens"] == len(losses)
    assert result["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.skipif(backend() == "reference", reason="packed weights need the kernels")
def test_json_has_the_promised_fields_and_the_ratio_to_other_weights(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    done = quality("--text", str(file), "--tokens", "40", "--against", "fp32", *POOL)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result = json.loads(done.stdout)
    fields = {
        "perplexity",
        "tokens",
        "nll",
        "bytes_per_token",
        "weights",
        "kv_dtype",
        "weights_bytes",
        "window",
    }
    assert fields < result.keys()
    assert fields < result["against"].keys()
    assert result["tokens"] == result["against"]["tokens"] <= 40
    assert (result["weights"], result["against"]["weights"]) == ("auto", "fp32")
    assert result["bytes_per_token"] == 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, head_dim, bytes
    assert result["weights_bytes"] < result["against"]["weights_bytes"]
    assert result["ratio"] == pytest.approx(result["perplexity"] / result["against"]["perplexity"])
    assert result["ratio"] == pytest.approx(1, abs=0.2)


@pytest.mark.usefixtures("smollm2_path")
def test_several_formats_are_a_table_and_a_picture(tmp_path: Path) -> None:
    file, picture = tmp_path / "text.txt", tmp_path / "picture.png"
    file.write_text(TEXT)
    drawn = importlib.util.find_spec("matplotlib") is not None
    plot = ("--plot", str(picture)) if drawn else ()
    arguments = ("--text", str(file), "--window", "0", "--bucket", "20", *plot, *POOL)
    done = quality(*arguments, "--kv-dtype", "fp32,int8", "--weights", "fp32")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [run["kv_dtype"] for run in result["runs"]] == ["fp32", "int8"]
    assert [run["ratio"] for run in result["runs"]] == [1, pytest.approx(1, abs=0.05)]
    assert result["kv_dtype"] == "fp32"
    whole = result["tokens"]
    blocks = -(-(whole + 1) // 16)
    fp32, int8 = (run["peak_cache_bytes"] for run in result["runs"])
    assert fp32 == blocks * 16 * 30 * 2 * 3 * 64 * 4
    assert int8 == blocks * 16 * 30 * 2 * 3 * (64 + 2) + blocks * (-(16 * 30 * 2 * 3 * 66) % 4096)
    positions = [point["position"] for point in result["by_position"]]
    assert positions[:2] == [10, 30]
    assert len(positions) == -(-whole // 20)
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")


def test_perplexity_by_position_is_that_of_each_bucket() -> None:
    two = Quality(((1.0, 2.0, 3.0, 4.0, 5.0), (3.0, 2.0)))
    points = dict(two.by_position(2))
    assert points.keys() == {1, 3, 5}
    assert [math.log(value) for value in points.values()] == pytest.approx([2.0, 3.5, 5.0])
    assert (two.tokens, two.nll) == (7, 20 / 7)


def test_windows_share_out_all_tokens_and_each_begins_as_the_model_wants() -> None:
    pieces = windows(list(range(10)), 5, (99,))
    assert pieces == [[99, 0, 1, 2, 3], [99, 4, 5, 6, 7], [99, 8, 9]]
    assert windows(list(range(10)), 0, (99,)) == [[99, *range(10)]]
    assert windows([1, 2, 3], 2, ()) == [[1, 2]]  # a last token alone has nothing to be predicted from


def test_a_window_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="window is 2; give at least 3 tokens"):
        windows([1, 2, 3], 2, (99,))


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--text", "no-such.txt"), 1, "no-such.txt"),
        (("--kv-dtype", "fp32,int3"), 2, "--kv-dtype is 'int3'; choose one of fp32, bf16"),
        (("--plot", "picture.txt"), 1, "--plot is 'picture.txt'; give a file ending in .png"),
        (("--retrieval", "no-such.jsonl"), 1, "no-such.jsonl"),
        (("--against", "int3"), 2, "--against is 'int3'; choose one of auto, int8, int4, bf16, fp32"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = quality(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.usefixtures("smollm2_path")
def test_a_file_that_is_no_text_and_one_that_is_empty_are_named(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"abc\xff")
    done = quality("--text", str(file))
    assert done.returncode == 1
    assert "which is no UTF-8 text (byte 3)" in done.stderr
    file.write_text("")
    done = quality("--text", str(file), *POOL)
    assert done.returncode == 1
    assert "text has no token to predict" in done.stderr
