"""Copies between servers: what fails is tried again, a bounded number of times, and not while one is down."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from valkey_servers import ValkeyServer, until, url_of

from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey import Servers, ServerTimeoutError, ValkeySettings
from kvstrata.tiers.valkey import copying as module
from kvstrata.tiers.valkey.copying import Copying
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.resp import Command, Reply

NAMES = [b"%d" % n for n in range(10)]


@pytest.fixture
def servers(valkeys: list[ValkeyServer]) -> Iterator[Servers]:
    made = Servers(ValkeySettings.from_url(parse_tier_url(url_of(valkeys[:2], timeout="1s"))))
    for name in NAMES:
        valkeys[0].call("SET", name, b"value " + name)
    yield made
    made.close()


@pytest.fixture
def copying() -> Iterator[Copying]:
    made = Copying(lambda nbytes: time.monotonic() + 10.0, 5.0)
    yield made
    made.close()


def failing(node: Node, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Have the first small calls of a node fail; a list that grows with each call."""
    calls: list[int] = []
    real = node.execute

    def execute(commands: list[Command], timeout: float | None = None) -> list[Reply]:
        calls.append(len(commands))
        if len(calls) <= times:
            raise ServerTimeoutError("no answer in time", node.name)
        return real(commands, timeout)

    monkeypatch.setattr(node, "execute", execute)
    return calls


def test_a_copy_that_fails_is_tried_again(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    source, target = servers.nodes
    failing(target, monkeypatch, 1)
    copying.add(source, target, NAMES, repair=True)
    assert copying.drain(30)
    assert [valkeys[1].call("GET", name) for name in NAMES] == [b"value " + name for name in NAMES]
    assert target.figures.repairs == len(NAMES)


def test_one_that_arrived_although_its_answer_did_not_counts_once(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    source, target = servers.nodes
    real = copying._move

    def move(*arguments: object) -> tuple[int, list[object]]:
        real(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(copying, "_move", real)
        raise ServerTimeoutError("no answer in time", target.name)

    monkeypatch.setattr(copying, "_move", move)
    copying.add(source, target, NAMES, repair=True)
    assert copying.drain(30)
    assert target.figures.repairs == len(NAMES)


def test_one_that_is_refused_is_tried_again(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    source, target = servers.nodes
    valkeys[1].call("CONFIG", "SET", "maxmemory", 1)
    real = copying._try_again
    refused: list[int] = []

    def try_again(batch: list[object]) -> None:
        refused.append(len(batch))
        valkeys[1].call("CONFIG", "SET", "maxmemory", 0)
        real(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(copying, "_try_again", try_again)
    copying.add(source, target, NAMES, repair=True)
    assert copying.drain(30)
    assert refused[0] == module._AT_ONCE
    assert [valkeys[1].call("EXISTS", name) for name in NAMES] == [1] * len(NAMES)
    assert target.figures.repairs == len(NAMES)


def test_an_error_does_not_pass_for_a_value_that_is_there(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying
):
    source, target = servers.nodes
    valkeys[1].call("ACL", "SETUSER", "default", "-exists")
    copying.add(source, target, NAMES, repair=True)
    assert copying.drain(30)
    assert [valkeys[1].call("GET", name) for name in NAMES] == [b"value " + name for name in NAMES]


def test_what_is_gone_meanwhile_is_not_copied(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying
):
    source, target = servers.nodes
    copying.add(source, target, [b"gone", *NAMES], repair=True)
    assert copying.drain(30)
    assert valkeys[1].call("DBSIZE") == len(NAMES)
    assert target.figures.repairs == len(NAMES)


def test_one_that_always_fails_is_given_up(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    source, target = servers.nodes
    calls = failing(target, monkeypatch, 1000)
    copying.add(source, target, NAMES[:1], repair=True)
    assert copying.drain(30)
    assert len(calls) == module._MOST_TRIES


def test_one_to_a_server_that_is_down_is_made_when_it_is_back(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(module, "_DOWN_PAUSE", 0.01)
    source, target = servers.nodes
    valkeys[1].kill()
    copying.add(source, target, NAMES, repair=True)
    until(lambda: not target.is_up)
    assert not copying.drain(0.2)  # longer than all tries take where it is up
    valkeys[1].start()
    assert copying.drain(30)
    assert [valkeys[1].call("EXISTS", name) for name in NAMES] == [1] * len(NAMES)


def test_one_to_a_server_that_stays_down_is_forgotten(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_DOWN_PAUSE", 0.01)
    monkeypatch.setattr(module, "_KEPT_SECONDS", 0.1)
    source, target = servers.nodes
    valkeys[1].kill()
    copying.add(source, target, NAMES, repair=True)
    assert copying.drain(30)


def test_no_more_copies_wait_than_may(
    servers: Servers, valkeys: list[ValkeyServer], copying: Copying, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    source, target = servers.nodes
    valkeys[1].kill()
    copying.add(source, target, NAMES, repair=True)
    until(lambda: not target.is_up)
    valkeys[1].start()
    assert copying.drain(30)
    assert sum(valkeys[1].call("EXISTS", name) == 1 for name in NAMES) == 3
