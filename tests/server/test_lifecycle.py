"""A server process from start to end: signals, drains, addresses, TLS."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import START, ServerProcess

LONG = {"prompt": "Once", "stream": True, "ignore_eos": True, "temperature": 0}


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[ServerProcess]:
    process = ServerProcess(
        "--model", str(model), "--kv-memory", "64MiB", "--max-model-len", "2048", "--threads", "1", *arguments
    )
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def streaming(server: ServerProcess, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with (
        httpx2.Client(base_url=server.url, timeout=START) as client,
        client.stream("POST", "/v1/completions", json={**LONG, **more}) as answer,
    ):
        assert answer.status_code == 200
        yield (line[6:] for line in answer.iter_lines() if line.startswith("data: "))


def tokens(events: list[str]) -> int:
    return sum(bool(choice["text"]) for event in events for choice in json.loads(event)["choices"])


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(smollm2_path: Path):
    with serving(smollm2_path) as server, streaming(server, max_tokens=300) as events:
        first = next(events)
        server.signal()
        while httpx2.get(f"{server.url}/ready", timeout=START).status_code == 200:
            pass
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=START)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        rest = list(events)
        assert rest[-1] == "[DONE]"
        finished = [json.loads(event)["choices"][0]["finish_reason"] for event in (first, *rest[:-1])]
        assert finished[-1] == "length"
        assert server.wait() == 0
        assert server.logged("stopped")


def test_what_is_not_finished_in_time_is_cut_off_with_an_error(smollm2_path: Path):
    with (
        serving(smollm2_path, "--drain-timeout", "0") as server,
        streaming(server, max_tokens=2000) as events,
    ):
        next(events)
        server.signal()
        rest = list(events)
        assert json.loads(rest[-2])["error"]["code"] == "aborted"
        assert server.wait() == 0
        [line] = server.logged()
        assert line["finish_reason"] == "abort"


def test_a_second_signal_ends_it_at_once(smollm2_path: Path):
    with serving(smollm2_path) as server, streaming(server, max_tokens=2000) as events:
        next(events)
        server.signal(signal.SIGINT)
        while not server.logged("draining"):
            next(events)
        server.signal(signal.SIGTERM)
        assert server.process.wait(START) == 128 + signal.SIGTERM


def test_an_idle_server_ends_on_ctrl_c(smollm2_path: Path):
    with serving(smollm2_path) as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "kvstrata", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=START,
        check=False,
        env={**os.environ, **env},
    )


def test_a_taken_port_is_one_clear_line_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = serve("--port", str(taken.getsockname()[1]), "--model", "/no/such/model.gguf")
    assert done.returncode == 1
    assert "cannot listen there" in done.stderr.splitlines()[-1]


def test_another_address_needs_keys_or_the_users_word():
    done = serve("--host", "0.0.0.0", "--print-config")
    assert done.returncode == 1
    assert "--insecure" in done.stderr
    assert serve("--host", "0.0.0.0", "--print-config", "--insecure").returncode == 0
    with_keys = serve("--host", "0.0.0.0", "--print-config", KVSTRATA_API_KEYS="alice:alice-secret")
    assert with_keys.returncode == 0
    assert "alice-secret" not in with_keys.stderr + with_keys.stdout


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_a_certificate_it_speaks_https_only(smollm2_path: Path, tmp_path: Path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    files = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files],
        check=True,
        capture_output=True,
        timeout=START,
    )
    with serving(smollm2_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        assert httpx2.get(f"{server.url}/health", verify=context).status_code == 200
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"{server.url.replace('https', 'http')}/health")
