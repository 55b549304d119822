"""The protocol: whatever pieces replies come in, they are read whole; what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.tiers.valkey.errors import ReplyError, ServerBrokenError
from kvstrata.tiers.valkey.resp import Reply, ReplyReader, encode

replies = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=9000),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def written(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(written, reply))
    return b"-%s\r\n" % str(reply).encode()


def reader(raw: bytes, chunk: int = 1 << 20) -> ReplyReader:
    place = 0

    def receive(memory: memoryview, whole: bool) -> int:
        nonlocal place
        if place == len(raw):
            raise EOFError
        count = len(memory) if whole else min(len(memory), chunk)
        piece = raw[place : place + count]
        if whole and len(piece) < count:
            raise EOFError
        memory[: len(piece)] = piece
        place += len(piece)
        return len(piece)

    return ReplyReader(receive)


@given(st.lists(replies, max_size=6), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_replies_are_read_whole_however_they_are_cut(found: list[Reply], chunk: int):
    source = reader(b"".join(map(written, found)), chunk)
    assert [source.reply() for _ in found] == found


@given(st.lists(st.binary(max_size=20_000), max_size=5), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_values_land_where_they_belong(values: list[bytes], chunk: int):
    source = reader(b"".join(written(value) for value in values) + b"$-1\r\n+OK\r\n", chunk)
    for value in values:
        assert source.bulk_length() == len(value)
        memory = bytearray(len(value))
        source.take(memoryview(memory)[: len(value) // 3])
        source.take(memoryview(memory)[len(value) // 3 :])
        source.end_bulk()
        assert bytes(memory) == value
    assert source.bulk_length() is None
    assert source.reply() == b"OK"


def test_an_error_in_a_values_place_is_a_value_and_the_next_reply_is_right():
    source = reader(b"-WRONGTYPE not a string\r\n$3\r\nabc\r\n:7\r\n")
    error = source.bulk_length()
    assert isinstance(error, ReplyError)
    assert error.code == "WRONGTYPE"
    length = source.bulk_length()
    assert length == 3
    source.pass_over(3)
    source.end_bulk()
    assert source.reply() == 7


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$abc\r\n",
        b"$99999999999999\r\n",
        b":1x\r\n",
        b"*1\r\n" * 20,
        b"x" * 200_000,
        b"$3\r\nabcdef",
    ],
)
def test_what_is_no_reply_is_refused(raw: bytes):
    with pytest.raises(ServerBrokenError):
        reader(raw).reply()


def test_large_arguments_are_not_copied():
    payload = bytearray(b"p" * 100_000)
    pieces = encode([("SET", "name", (b"head", payload)), ("GET", "name")])
    assert any(isinstance(piece, memoryview) and piece.obj is payload for piece in pieces)
    assert b"".join(pieces) == (
        b"*3\r\n$3\r\nSET\r\n$4\r\nname\r\n$100004\r\nhead"
        + payload
        + b"\r\n*2\r\n$3\r\nGET\r\n$4\r\nname\r\n"
    )
