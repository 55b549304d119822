"""The commands that run a model, as processes: stdout, stderr and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("smollm2_path")


def kvstrata(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstrata", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


POOL = ("--kv-memory", "256MiB")


def test_generate_json_is_one_object_with_the_promised_fields() -> None:
    done = kvstrata("generate", "What is the capital of France?", "--json", *POOL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) >= {
        "text",
        "token_ids",
        "prompt_tokens",
        "cached_tokens",
        "ttft_ms",
        "decode_tok_s",
        "finish_reason",
    }
    assert "Paris" in result["text"]
    assert result["finish_reason"] == "stop"
    assert len(done.stdout.splitlines()) == 1


def test_generate_for_people_prints_the_text_alone_on_stdout() -> None:
    done = kvstrata("generate", "-", "--raw", "--max-tokens", "5", *POOL, stdin="The capital of France is")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("Paris")
    assert "prompt tokens" in done.stderr


def test_chat_over_a_pipe_answers_each_line() -> None:
    done = kvstrata(
        "chat", "--json", "--max-tokens", "16", *POOL, stdin="Say hello.\n\nSay goodbye.\n/exit\nno\n"
    )
    assert done.returncode == 0, done.stderr
    turns = json.loads(done.stdout)["turns"]
    assert len(turns) == 2
    assert turns[1]["cached_tokens"] > 0


def test_demo_json() -> None:
    done = kvstrata("demo", "--json", *POOL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "Paris" in result["answer"]
    cold, *warm = result["runs"]
    assert cold["cached_tokens"] == 0
    assert all(run["cached_tokens"] > 1000 for run in warm)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate",), 2, "prompt"),
        (("generate", "x", "--kv-memory", "lots"), 2, "--kv-memory is 'lots'; give a size"),
        (("generate", "x", "--temperature", "-1"), 2, "--temperature is -1.0"),
        (("generate", "x", "--policy", "mru"), 2, "--policy is 'mru'; choose one of lru, lrfu, fifo, ttl"),
        (("generate", "x", "--raw", "--system", "y"), 2, "--system goes with the chat format"),
        (("generate", "", *POOL, "--raw"), 1, "prompt is empty"),
        (("generate", "x", "--model", "no/such/file.gguf"), 1, "no/such/file.gguf"),
        (("bench", "paging", "--trace", "no-such.csv"), 1, "no-such.csv"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = kvstrata(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1


def test_a_model_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    done = kvstrata("generate", "x", "--model", str(path))
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr


def test_generate_tells_what_came_from_tiers_and_what_did_not() -> None:
    done = kvstrata("generate", "Hello", "--json", "--max-tokens", "2", "--tier", "ram://?size=64MiB", *POOL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loads"] == []
    assert result["recomputed"] == {"absent": result["prompt_tokens"] // 16 * 16}
    refused = kvstrata("generate", "Hello", "--tier", "tape://x", *POOL)
    assert refused.returncode == 1
    assert "the kinds are" in refused.stderr


def test_generate_takes_a_retention_and_refuses_one_that_cannot_be() -> None:
    done = kvstrata("generate", "Hello", "--json", "--max-tokens", "40", "--retention", "sinks:4+20", *POOL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] > 0
    for wrong in ("sinks:-1", "window:0", "many"):
        refused = kvstrata("generate", "Hello", "--retention", wrong, *POOL)
        assert refused.returncode == 2
        assert f"--retention is '{wrong}'" in " ".join(refused.stderr.split())
        assert "sinks:4+1020" in " ".join(refused.stderr.replace("│", " ").split())
    refused = kvstrata("generate", "Hello", "--retention", "window:100000", *POOL)
    assert refused.returncode == 1
    assert "the model was made for 8192" in refused.stderr


def test_generate_tells_what_was_proposed_and_accepted() -> None:
    repeat = ("--raw", "--max-tokens", "24", "--draft-tokens", "3", "--no-draft-adaptive")
    text = "one two three four five six one two three four five six one two three"
    plain = kvstrata("generate", text, "--json", *repeat, *POOL)
    done = kvstrata("generate", text, "--json", "--draft", "ngram", *repeat, *POOL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["token_ids"] == json.loads(plain.stdout)["token_ids"]
    told = result["speculation"]
    assert told["drafts"] > 0
    assert told["acceptance"] == told["accepted_tokens"] / told["draft_tokens"]
    assert sum(told["accepted_by_position"]) == told["accepted_tokens"]
    assert json.loads(plain.stdout)["speculation"]["acceptance"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--draft", "trigram"), 2, "--draft is 'trigram'; give ngram, or layers:K"),
        (("--draft", "layers:99"), 1, "draft is 'layers:99'; the model has 30 layers: give no more"),
        (("--draft", "ngram", "--draft-model", "x"), 2, "give one of the two"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_in_one_line(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = kvstrata("generate", "x", *arguments, *POOL)
    assert done.returncode == code
    assert message in done.stderr


def test_a_draft_of_another_vocabulary_is_refused(gemma_path: Path) -> None:
    done = kvstrata("generate", "x", "--draft-model", str(gemma_path), *POOL)
    assert done.returncode == 1
    assert "its vocabulary has 262144 tokens, the model's 49152" in done.stderr
