"""Bodies that no client should send: each is answered with 4xx in the field's shape and harms nobody else."""

from __future__ import annotations

import json

import httpx2
import pytest
from served import toy_server

NESTED = 100_000
BODIES = {
    "nothing": b"",
    "no json": b"{prompt: 1}",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "deep": b"[" * NESTED + b"]" * NESTED,
    "deep in a field": b'{"prompt": ' + b"[" * NESTED + b"]" * NESTED + b"}",
    "a list": b"[1, 2]",
    "null": b"null",
    "no prompt": b"{}",
    "empty prompt": b'{"prompt": ""}',
    "empty list": b'{"prompt": []}',
    "empty ids": b'{"prompt": [[]]}',
    "mixed list": b'{"prompt": ["a", 1]}',
    "ids beyond the vocabulary": b'{"prompt": [5, 100000]}',
    "negative ids": b'{"prompt": [-1]}',
    "ids of 5000 digits": b'{"prompt": [' + b"9" * 5000 + b"]}",
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "half a surrogate in the model": b'{"prompt": "a", "model": "\\ud800"}',
    "half a surrogate in a name": b'{"prompt": "a", "\\ud800": 1}',
    "unknown model": b'{"prompt": "a", "model": "gpt"}',
    "too long": json.dumps({"prompt": "a" * 600}).encode(),
    "negative max_tokens": b'{"prompt": "a", "max_tokens": -1}',
    "huge max_tokens": b'{"prompt": "a", "max_tokens": 1e400}',
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "top_p": Infinity}',
    "text for a number": b'{"prompt": "a", "temperature": "1"}',
    "true for a number": b'{"prompt": "a", "max_tokens": true}',
    "huge n": b'{"prompt": "a", "n": 1000000000}',
    "no n": b'{"prompt": "a", "n": 0}',
    "empty stop": b'{"prompt": "a", "stop": [""]}',
    "many stops": json.dumps({"prompt": "a", "stop": ["a"] * 100}).encode(),
    "wrong stop id": b'{"prompt": "a", "stop_token_ids": [-5]}',
    "many logprobs": b'{"prompt": "a", "logprobs": 1000}',
    "huge priority": b'{"prompt": "a", "priority": 1e30}',
    "huge whole priority": b'{"prompt": "a", "priority": 99999999999999999999}',
    "no ttl": b'{"prompt": "a", "kvstrata": {"ttl": 0}}',
    "unknown field": b'{"prompt": "a", "bogus": 1}',
    "unknown field in a field": b'{"prompt": "a", "kvstrata": {"bogus": 1}}',
    "a million values": b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
    "sixty thousand unknown fields": json.dumps(
        {"prompt": "a", **dict.fromkeys(map(str, range(60_000)))}
    ).encode(),
    "sixty thousand wrong ids": json.dumps({"prompt": [1] * 30_000 + [True] * 30_000}).encode(),
}
CHATS = {
    "no messages": b'{"messages": []}',
    "messages that are none": b'{"messages": "hello"}',
    "no content": b'{"messages": [{"role": "user"}]}',
    "a picture": b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep content": b'{"messages": [{"role": "user", "content": ' + b"[" * NESTED + b"]" * NESTED + b"}]}",
    "names of ours": b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"self": 1}}',
}


@pytest.fixture(scope="module")
def server():
    with toy_server() as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(pytest.param("/v1/completions", body, id=name) for name, body in BODIES.items()),
        *(pytest.param("/v1/chat/completions", body, id=f"chat: {name}") for name, body in CHATS.items()),
    ],
)
def test_a_malformed_body_is_the_clients_error_and_harms_nobody(server, path: str, body: bytes):
    with server.client() as client:
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
    server.until_idle()


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {}, {"content-encoding": "gzip"}])
def test_another_content_type_is_the_clients_error(server, headers: dict[str, str]):
    with server.client() as client:
        answer = client.post("/v1/completions", content=b'{"prompt": "a"', headers=headers)
    assert answer.status_code == 400
    assert "error" in answer.json()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_another_method_is_405(server, method: str):
    answer = httpx2.request(method, f"{server.url}/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_strange_ids_of_requests_are_not_repeated(server):
    for given in ("x" * 1000, "a b", 'a"b'):
        with server.client() as client:
            answer = client.get("/v1/models", headers={"x-request-id": given})
        assert answer.headers["x-request-id"] != given
