"""Unreachable, a wrong password, out of memory, read-only: said at the start, and only misses later on."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import CONTEXT, HIT, blocks, drops, misses
from valkey_servers import ValkeyServer, found, until, url_of, valkey_servers

from kvstrata.errors import ConfigError
from kvstrata.tiers.open import open_tier

PASSWORD = "right-and-long"
ACL = Path(__file__).resolve().parents[2] / "deploy" / "valkey" / "users.acl"


@pytest.fixture
def guarded() -> Iterator[ValkeyServer]:
    with valkey_servers(1, {"requirepass": PASSWORD}) as [server]:
        yield server


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as refused:
        open_tier(url, CONTEXT)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def documented_user() -> list[str]:
    """The words of the user that the operations guide recommends."""
    [line] = [line for line in ACL.read_text().splitlines() if line.startswith("user kvstrata ")]
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    return line.replace("REPLACE_WITH_SHA256_OF_THE_PASSWORD", digest).split()[1:]


def test_a_host_that_cannot_be_reached_is_named():
    assert "127.0.0.1:1: Connection refused" in refusal("valkey://127.0.0.1:1")
    assert "no-such-host.invalid:6379" in refusal("valkey://no-such-host.invalid")


def test_one_of_several_that_cannot_be_reached_does_not_keep_from_starting(valkeys: list[ValkeyServer]):
    valkeys[1].kill()
    tier = open_tier(url_of(valkeys), CONTEXT)
    assert drops(tier, blocks(100)) == [None] * 100
    assert misses(tier, blocks(100)) == [HIT] * 100
    tier.close()


def test_a_password_that_is_wrong_or_lacking_is_said_and_not_repeated(
    guarded: ValkeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("STORE_PASSWORD", "wrong-one")
    told = refusal(url_of([guarded], password="env:STORE_PASSWORD"))
    assert "does not let us in (WRONGPASS" in told
    assert "does not let us in (NOAUTH" in refusal(url_of([guarded]))
    assert "wrong-one" not in told + caplog.text
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
    tier = open_tier(url_of([guarded], password="env:STORE_PASSWORD"), CONTEXT)
    assert drops(tier, blocks(4)) == [None] * 4
    tier.close()
    assert PASSWORD not in caplog.text


def test_a_user_of_the_acl_is_let_in_and_one_who_may_not_write_is_told(
    valkeys: list[ValkeyServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
    for server in valkeys:
        server.call("ACL", "SETUSER", *documented_user())
        server.call(
            "ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~kvstrata:*", "+@read", "+@connection", "+info"
        )
    options = {"password": "env:STORE_PASSWORD"}
    tier = open_tier(url_of(valkeys, user="kvstrata", replicas=2, **options), CONTEXT)
    assert drops(tier, blocks(4)) == [None] * 4
    assert misses(tier, blocks(4)) == [HIT] * 4
    tier.touch([blocks(1)[0].identity.address], [blocks(1)[0].identity.segment])
    until(lambda: tier.usage().records >= 8)
    assert all(found(tier, blocks(4)))
    tier.clear()
    assert not any(found(tier, blocks(4)))
    assert not any(server.errors for server in tier.usage().servers)
    tier.close()
    assert "does not allow SET" in refusal(url_of(valkeys, user="reader", **options))


def test_a_server_without_memory_is_told_with_what_to_do_and_later_drops_blocks():
    with valkey_servers(1, {"maxmemory": "100mb", "maxmemory-policy": "noeviction"}) as [server]:
        tier = open_tier(url_of([server]), CONTEXT)
        assert drops(tier, blocks(4)) == [None] * 4
        server.call("CONFIG", "SET", "maxmemory", "1mb")
        assert drops(tier, blocks(4, chain=1)) == ["full"] * 4
        assert misses(tier, blocks(4)) == [HIT] * 4
        tier.close()
        assert "out of memory" in refusal(url_of([server]))
        assert "allkeys-lfu" in refusal(url_of([server]))


def test_a_read_only_replica_is_told_with_its_primary_and_later_drops_blocks(valkeys: list[ValkeyServer]):
    primary, replica = valkeys[:2]
    tier = open_tier(url_of([replica]), CONTEXT)
    replica.call("REPLICAOF", "127.0.0.1", primary.port)
    until(lambda: b"role:slave" in replica.call("INFO", "replication"))  # type: ignore[operator]
    assert drops(tier, blocks(4)) == ["read_only"] * 4
    tier.close()
    assert f"read-only replica of {primary.name}" in refusal(url_of([replica]))


def test_what_is_no_valkey_server_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "is none" in refusal(f"valkey://127.0.0.1:{listener.getsockname()[1]}")


def test_a_server_that_begins_to_refuse_costs_hits_only(
    guarded: ValkeyServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
    tier = open_tier(url_of([guarded], password="env:STORE_PASSWORD"), CONTEXT)
    drops(tier, blocks(4))
    guarded.kill()
    guarded._config["requirepass"] = "another-password"
    guarded.start()
    found(tier, blocks(4))
    assert found(tier, blocks(4)) == [False] * 4
    assert misses(tier, blocks(4)) == ["unavailable"] * 4
    assert tier.usage().servers[0].errors["refuses"] > 0
    tier.close()
