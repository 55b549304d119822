"""One server of the default model for all tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import START, ServerProcess


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        "--model", str(smollm2_path), "--kv-memory", "128MiB", "--max-model-len", "1024", "--threads", "1"
    )
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=START) as client:
        yield client
