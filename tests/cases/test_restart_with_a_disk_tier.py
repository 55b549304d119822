"""A server that is told to stop writes to its tiers what is on the way there, and the next one finds it."""

from __future__ import annotations

from pathlib import Path

import httpx2
from served import START, ServerProcess

PROMPT = "The lighthouse keeper wrote the same sentence into his book every evening. " * 12


def ask(server: ServerProcess) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=START)
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_next_process_finds_what_the_last_one_computed(smollm2_path: Path, tmp_path: Path):
    arguments = ("--model", str(smollm2_path), "--kv-memory", "64MiB", "--threads", "1")
    arguments += ("--tier", f"disk://{tmp_path / 'cache'}?size=256MiB", "--load-mode", "always")
    server = ServerProcess(*arguments)
    try:
        assert ask(server) == 0
    finally:
        assert server.stop() == 0
    server = ServerProcess(*arguments)
    try:
        assert ask(server) > 100
        told = httpx2.get(f"{server.url}/metrics", timeout=START).text
        [line] = [
            line
            for line in told.splitlines()
            if line.startswith('kvstrata:prompt_tokens_cached_by_source_total{source="disk"}')
        ]
        assert float(line.split()[-1]) > 100
        assert "tiers" in server.info["settings"]
    finally:
        assert server.stop() == 0
