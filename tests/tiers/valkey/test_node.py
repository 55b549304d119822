"""One server: pipelined calls from many threads, typed errors, and connections that died unnoticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from valkey_servers import ValkeyServer, until, url_of

from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey import (
    ReplyError,
    ServerAvoidedError,
    ServerDownError,
    Servers,
    ServerTimeoutError,
    ValkeySettings,
    script,
)


@pytest.fixture
def servers(valkeys: list[ValkeyServer]) -> Iterator[Servers]:
    made = Servers(ValkeySettings.from_url(parse_tier_url(url_of(valkeys[:1], connections=4))))
    yield made
    made.close()


def test_replies_are_in_order_and_one_that_fails_is_a_value(servers: Servers, valkeys: list[ValkeyServer]):
    replies = servers.execute(
        valkeys[0].name,
        [
            ("SET", "lease", "me", "NX", "PX", 60_000),
            ("SET", "lease", "you", "NX", "PX", 60_000),
            ("INCR", "lease"),
            script("return {KEYS[1], ARGV[1], redis.call('GET', KEYS[1])}", ["lease"], ["x"]),
        ],
    )
    assert replies[:2] == [b"OK", None]
    assert isinstance(replies[2], ReplyError)
    assert replies[2].code == "ERR"
    assert replies[3] == [b"lease", b"x", b"me"]


def test_many_threads_share_few_connections(servers: Servers, valkeys: list[ValkeyServer]):
    def add(number: int) -> None:
        servers.execute(valkeys[0].name, [("INCR", "count"), ("SADD", "seen", str(number))], 30.0)

    with ThreadPoolExecutor(50) as threads:
        list(threads.map(add, range(500)))
    assert valkeys[0].call("GET", "count") == b"500"
    assert valkeys[0].call("SCARD", "seen") == 500
    assert len(str(valkeys[0].call("CLIENT", "LIST")).split("id=")) - 1 <= 5  # ours, and this one


def test_connections_that_the_server_closed_are_replaced_without_an_error(
    servers: Servers, valkeys: list[ValkeyServer]
):
    for _ in range(3):
        assert servers.execute(valkeys[0].name, [("PING",)]) == [b"PONG"]
        valkeys[0].call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert not servers.nodes[0].figures.errors


def test_errors_have_their_type_and_an_open_breaker_answers_at_once(
    servers: Servers, valkeys: list[ValkeyServer]
):
    node = servers.node(valkeys[0].name)
    node.execute([("PING",)])
    valkeys[0].stop()
    for _ in range(2):
        with pytest.raises(ServerTimeoutError):
            node.execute([("PING",)])
    with pytest.raises(ServerAvoidedError):
        node.execute([("PING",)])
    assert servers.owner(b"any") is None
    valkeys[0].resume()
    until(lambda: servers.owner(b"any") == node.name)
    valkeys[0].kill()
    with pytest.raises(ServerDownError):
        node.execute([("PING",)])
    assert node.state != "closed"
    with pytest.raises(ServerAvoidedError):
        servers.node("cache-9:6379")


def test_waiting_for_a_connection_is_bounded_and_is_not_the_servers_fault(
    servers: Servers, valkeys: list[ValkeyServer]
):
    node, taken, release = servers.node(valkeys[0].name), threading.Barrier(5), threading.Event()

    def hold() -> None:
        with node.transfer(time.monotonic() + 30):
            taken.wait(30)
            release.wait(30)

    holders = [threading.Thread(target=hold) for _ in range(4)]
    for holder in holders:
        holder.start()
    taken.wait(30)
    with pytest.raises(ServerAvoidedError, match="in use"), node.transfer(time.monotonic() + 0.01):
        pass
    assert node.execute([("PING",)]) == [b"PONG"], "small calls have connections of their own"
    release.set()
    for holder in holders:
        holder.join()
    assert node.is_up
