"""A client that leaves while its prompt or its answer is computed: blocks come back within a step."""

from __future__ import annotations

import json

import pytest
from served import ToyServer, request_bytes, toy_server

PROMPT = "a prompt of thirty-eight chars, not 4*n"  # no whole number of blocks or of chunks
TOY = {"blocks": 64, "block_size": 4, "token_budget": 7}


def ask(stream: bool, **more: object) -> bytes:
    body = {"prompt": PROMPT, "stream": stream, "ignore_eos": True, **more}
    return request_bytes(json.dumps(body).encode())


def steps(server: ToyServer, count: int) -> None:
    """Let so many steps pass, and wait until the next one is at the gate."""
    assert server.gate is not None
    gate = server.gate
    server.until(lambda: gate.arrived > 0)
    for number in range(gate.arrived + 1, gate.arrived + count + 1):
        gate.let()
        server.until(lambda number=number: gate.arrived == number)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_leaving_mid_prefill_at_an_unaligned_length_and_asking_again_at_once(stream: bool, after: int):
    with toy_server(gated=True, **TOY) as server:
        assert server.gate is not None
        with server.connect() as connection:
            connection.sendall(ask(stream, max_tokens=100))
            steps(server, after)
            computed = server.toy.model.tokens_computed
        server.until(lambda: not server.service.calls or next(iter(server.service.calls)).left)
        server.gate.let()  # the step that was under way; the abort comes before the next one
        server.until(lambda: server.service.serving.open_requests == 0)
        assert server.toy.model.tokens_computed <= computed + TOY["token_budget"]
        server.gate.open()
        server.until_idle()
        again = server.post(prompt=PROMPT, max_tokens=5, ignore_eos=True, temperature=0)
        assert again.status_code == 200
        fresh = server.post(prompt=PROMPT, max_tokens=5, ignore_eos=True, temperature=0, cache_salt="cold")
        assert again.json()["choices"] == fresh.json()["choices"]
        server.until_idle()
        assert server.entries()[0]["status"] == 499


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_while_the_answer_streams(n: int):
    with toy_server(gated=True, **TOY) as server:
        assert server.gate is not None
        with server.connect() as connection:
            connection.sendall(ask(True, max_tokens=400, n=n, temperature=1))
            steps(server, 8)
            assert b"200 OK" in connection.recv(4096)
        server.until(lambda: not server.service.calls or next(iter(server.service.calls)).left)
        server.gate.let()
        server.until(lambda: server.service.serving.open_requests == 0)
        server.gate.open()
        server.until_idle()
        steps_so_far = server.toy.model.steps
        assert steps_so_far < 20
        [line] = server.entries()
        assert "abort" in line["finish_reason"]
