"""`kvstrata bench attention` prints a share of the machine's limits for every dtype and context."""

import json

import pytest

from kvstrata.cli.app import main


def test_json_has_a_share_for_every_dtype_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--layers", "1", "--repeats", "1"]
    assert main(["bench", "attention", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bandwidth_share"].keys() == {"bf16", "fp16", "fp32"}
    shares = [share for dtype in result["bandwidth_share"].values() for share in dtype.values()]
    shares += result["product_share"]["bf16"].values()
    assert all(share > 0 for share in shares)
    assert len(shares) == len(result["rows"])


def test_heads_that_no_kv_head_divides_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--heads", "5", "--kv-heads", "2"]) != 0
    assert "--heads is 5, expected a multiple of --kv-heads (2)" in capsys.readouterr().err
