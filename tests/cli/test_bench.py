"""What each measurement prints, at sizes that take a moment: its fields, never how fast it was."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from valkey_servers import ValkeyServer, keys, url_of

from kvstrata.cli.app import main
from kvstrata.cli.bench.spec_figures import loops
from kvstrata.kernels import backend

needs_kernels = pytest.mark.skipif(backend() == "reference", reason="packs weights, which needs the kernels")
SMALL_POOL = ("--kv-memory", "128MiB")


def figures(*arguments: str) -> dict[str, Any]:
    """What `kvstrata bench ... --json` prints, as a process."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_attention_has_a_share_for_every_dtype_and_context() -> None:
    sizes = ("--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--layers", "1", "--repeats", "1")
    result = figures("attention", *sizes, "--context", "32", "--context", "64", "--prompt", "40")
    assert result["bandwidth_share"].keys() == {"bf16", "fp16", "fp32", "fp8_e4m3", "int8", "int4"}
    for shares in result["bandwidth_share"].values():
        assert shares.keys() == {"32", "64"}
        assert all(share > 0 for share in shares.values())
    assert result["product_share"].keys() == {"40"}
    assert result["decode bf16 8 x 64"]["unit"] == "GB/s"
    assert result["prefill bf16 1 x 40"]["unit"] == "GFLOP/s"


@needs_kernels
def test_linear_has_a_row_for_every_format_and_number_of_rows() -> None:
    sizes = ("--layers", "1", "--vocabulary", "64", "--repeats", "1", "--rows", "1", "--rows", "3")
    result = figures("linear", *sizes, "--format", "Q4_1", "--format", "Q6_K")
    names = {"Q4_1 x 1", "Q4_1 x 3", "Q4_1 head", "Q6_K x 1", "Q6_K x 3", "Q6_K head"}
    assert result.keys() == {"backend", "threads", *names}
    for name in names:
        assert result[name].keys() == {"ms", "tok_s", "gb_s", "bandwidth_share", "gflop_s"}
        assert all(value > 0 for value in result[name].values())


def test_control_has_a_total_its_parts_and_the_decode_steps() -> None:
    result = figures("control", "--tokens", "320", "--layers", "2", "--repeats", "1")
    assert result["parts_ms"].keys() == {"keys", "match", "open", "grow", "commit", "release"}
    assert result["total_ms_320_cached"] == pytest.approx(sum(result["parts_ms"].values()))
    for sequences in (1, 32):
        step = result[f"decode_step_{sequences}"]
        assert 0 < step["outside_forward_ms"] < step["ms"]


@pytest.mark.usefixtures("smollm2_path")
def test_phases_has_a_row_for_every_context_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "phases.png"
    drawn = importlib.util.find_spec("matplotlib") is not None
    plot = ("--plot", str(picture)) if drawn else ()
    sizes = ("--context", "16", "--context", "32", "--steps", "2", "--repeats", "1")
    result = figures("phases", *sizes, *SMALL_POOL, *plot)
    assert result["context"].keys() == {"16", "32"}
    for row in result["context"].values():
        assert row.keys() == {
            "with_cache_ms",
            "without_cache_ms",
            "ratio",
            "prefill_tok_s",
            "decode_tok_s",
            "prefill_product_share",
            "prefill_bandwidth_share",
            "decode_product_share",
            "decode_bandwidth_share",
        }
        assert all(value > 0 for value in row.values())
    assert result["product_kind"] in {"int8", "fp32"}
    assert picture.exists() == drawn
    if drawn:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert main(["bench", "phases", "--plot", str(tmp_path / "phases.png")]) == 1
    assert "pip install 'kvstrata[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("attention", "--heads", "5", "--kv-heads", "2"),
            "--heads is 5, expected a multiple of --kv-heads (2)",
        ),
        (("linear", "--format", "Q9"), "--format is 'Q9'; choose one of Q4_1, Q8_0, Q4_0, Q4_K, Q6_K"),
        (("spec", "--figure", "speed"), "--figure is 'speed'; choose from ngram_repeat"),
        (("phases", "--plot", "no/such/folder/x.png"), "in a folder that does not exist"),
        (("phases", "--plot", "x.txt"), "--plot is 'x.txt'; give a file ending in .png, .svg, .pdf"),
        (
            ("control", "--tokens", "32", "--vllm-python", "no/such"),
            "--vllm-python is 'no/such', which does not",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def write_prompts(folder: Path) -> Path:
    """The four sets, a line or two each."""
    code = {"entry_point": "add", "prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n"}
    record = {"id": "A1", "flights": [{"number": f"HAT{n:03}", "from": "JFK", "to": "SEA"} for n in range(3)]}
    (folder / "mt_bench_question.jsonl").write_text(json.dumps({"turns": ["Say hello.", "Again."]}) + "\n")
    for name, row in (
        ("HumanEval.jsonl.gz", code),
        ("gsm8k_test.jsonl.gz", {"question": "What is 3 + 4?"}),
        (
            "taubench_gpt-4o-airline_trajectories.json.gz",
            [{"traj": [{"role": "tool", "content": json.dumps(record)}]}],
        ),
    ):
        (folder / name).write_bytes(gzip.compress(json.dumps(row).encode()))
    return folder


@needs_kernels
@pytest.mark.usefixtures("smollm2_path")
def test_spec_has_a_speed_up_prompts_and_tokens_for_every_figure(tmp_path: Path) -> None:
    sizes = ("--prompts", str(write_prompts(tmp_path)), "--count", "2", "--max-tokens", "8", "--repeats", "1")
    names = ("ngram_repeat", "ngram_open_ended", "self_draft")
    result = figures("spec", *sizes, *SMALL_POOL, *(part for name in names for part in ("--figure", name)))
    for name in names:
        assert result[f"{name}_identical"] is True
        assert result[f"{name}_prompts"] + result[f"{name}_left_out"] == (2 if name == "ngram_repeat" else 1)
        assert result[f"{name}_tokens"] > 0
        assert result[f"{name}_speedup"] > 0
    assert result["self_draft_acceptance"] == 1.0


def test_an_answer_that_goes_round_is_a_loop() -> None:
    assert loops([*range(8)] * 4)
    assert not loops([*range(8)] * 3)
    assert not loops([*range(100)])
    assert not loops([])


def test_policies_replays_a_trace_through_all_of_them(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * n, "hash_ids": [0, 1, 2 + n % 3]} for n in range(30)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = figures("policies", "--trace", str(trace), "--capacity", "3", "--capacity", "10")
    assert result["hit_ratio"].keys() == result["thrash"].keys() == {"lru", "lrfu", "fifo", "ttl"}
    assert result["unbounded_hit_ratio"] == pytest.approx(85 / 90)
    for name, ratios in result["hit_ratio"].items():
        assert ratios["10"] == pytest.approx(85 / 90)
        assert ratios["3"] == pytest.approx(58 / 90)
        assert result["thrash"][name]["10"] == 0
        assert result["thrash"][name]["3"] > 0.8
    missing = subprocess.run(
        [sys.executable, "-m", "kvstrata", "bench", "policies", "--trace", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert missing.returncode == 1
    assert "cannot be read" in missing.stderr


@needs_kernels
@pytest.mark.usefixtures("smollm2_path")
def test_tiers_has_the_promised_ratios_and_answers_that_agree(tmp_path: Path) -> None:
    sizes = ("--prompt", "64", "--megabytes", "8", "--repeats", "1", "--folder", str(tmp_path))
    result = figures("tiers", *sizes, *SMALL_POOL, "--load-mode", "always")
    for name in ("ram_store_vs_memcpy", "ram_load_vs_memcpy", "disk_store_vs_plain", "disk_load_vs_plain"):
        assert result[name] > 0
    assert result["ttft_ms"].keys() == {"cold", "pool", "ram", "disk_restart"}
    assert result["cached_by_source"] == {
        "cold": {},
        "pool": {"pool": 64},
        "ram": {"ram": 64},
        "disk_restart": {"disk": 64},
    }
    assert result["identical"] is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("smollm2_path")
def test_smaller_formats_hold_as_many_more_requests_as_their_blocks_are_smaller() -> None:
    result = figures("capacity", "--length", "200", "--answer", "150", "--kv-memory", "128MiB")
    runs = {name: result[name] for name in ("bf16", "fp8_e4m3", "int8", "int4")}
    blocks = -(-200 // 16)
    for run in runs.values():
        stride = -(-run["bytes_per_token"] * 16 // 4096) * 4096
        assert run["pool_tokens"] == (128 << 20) // stride * 16
        by_blocks = run["pool_tokens"] // 16 // blocks
        assert by_blocks <= run["requests"] <= 1.05 * by_blocks  # the last begin before the first are long
        assert run["times_the_first"] == run["requests"] / runs["bf16"]["requests"]
    assert runs["int8"]["times_the_first"] >= 1.85
    assert runs["int4"]["times_the_first"] >= 3
    sizes = ("--length", "40", "--answer", "9", "--kv-memory", "8MiB")
    few = figures("capacity", "--kv-dtype", "fp32,int8", *sizes)
    assert few["fp32"]["requests"] < few["int8"]["requests"]
    assert "bf16" not in few


def test_ring_has_what_moves_and_how_even_it_is() -> None:
    result = figures("ring", "--keys", "20000")
    assert 0.21 <= result["moved_share"] <= 0.29
    assert result["moved_elsewhere"] == 0
    assert result["restored"] is True
    assert 1.0 <= result["balance"] <= 1.2
    assert 2.8 <= result["three_hold"] <= 3.0


def test_a_valkey_tier_has_its_shares_of_loopback(valkeys: list[ValkeyServer]) -> None:
    from kvstrata.cli.bench.tier_moves import Blocks, valkey_ratios
    from kvstrata.tiers.tier import StoreContext

    blocks = Blocks(StoreContext(b"b" * 32, 16, (64 << 10,)), 100 * (64 << 10))
    result = valkey_ratios(url_of(valkeys), blocks, 2)
    assert result["identical"] is True
    assert all(result[f"valkey_{kind}_vs_loopback"] > 0 for kind in ("store", "load"))
    assert sum(keys(server) for server in valkeys) == 0, "it leaves nothing behind"
