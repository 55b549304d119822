"""What comes over the wire: heads without end, long bodies, several requests on one connection."""

from __future__ import annotations

import json
import socket

import pytest
from served import ToyServer, request_bytes, toy_server

from kvstrata.server.wire import MAX_HEAD


@pytest.fixture(scope="module")
def server():
    with toy_server(blocks=4000, max_model_len=4000, token_budget=512) as running:
        yield running


def test_a_head_without_end_is_refused(server: ToyServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        answer = b""
        try:
            for _ in range(3 * MAX_HEAD // 1024):
                connection.sendall(b"x-more: " + b"a" * 1014 + b"\r\n")
            answer = read_all(connection)
        except OSError:  # the rest of the head met a closed connection
            pass
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert server.post(prompt="hi", max_tokens=1).status_code == 200


def test_long_bodies_are_no_heads_and_requests_follow_each_other(server: ToyServer) -> None:
    long = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "u" * (4 * MAX_HEAD)}).encode()
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(request_bytes(long))
            assert read_reply(connection).startswith(b"HTTP/1.1 200 ")


def test_a_long_head_in_pieces_is_taken(server: ToyServer) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    whole = request_bytes(body, headers="x-more: " + "a" * (MAX_HEAD // 4) + "\r\n")
    with server.connect() as connection:
        for start in range(0, len(whole), 5000):
            connection.sendall(whole[start : start + 5000])
        assert read_reply(connection).startswith(b"HTTP/1.1 200 ")


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_reply(connection: socket.socket) -> bytes:
    """One reply with a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = next(
        int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    while len(rest) < length:
        rest += connection.recv(65536)
    return head
