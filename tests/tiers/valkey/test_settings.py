"""What a `valkey://` URL may say, and that a password never comes back out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.tiers.open import check_tier_url
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings, read_servers


def settings(url: str) -> ValkeySettings:
    return ValkeySettings.from_url(parse_tier_url(url))


def test_servers_weights_and_options_are_taken_apart():
    found = settings(
        "valkey://a:1,b?replicas=2&weights=2,1&ttl=1h&timeout=20ms&stall=1s&connections=8&grace=5m"
    )
    assert [(s.name, s.weight) for s in found.servers] == [("a:1", 2.0), ("b:6379", 1.0)]
    assert (found.replicas, found.ttl, found.timeout, found.stall) == (2, 3600.0, 0.02, 1.0)
    assert (found.connections, found.grace, found.prefix) == (8, 300.0, "kvstrata")
    assert settings("valkey://a").timeout == 0.05


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("valkey://", "server ''"),
        ("valkey://a:0", "server 'a:0'"),
        ("valkey://a,a:6379", "twice"),
        ("valkey://a?replicas=2", "replicas is '2'"),
        ("valkey://a?timeout=fast", "timeout is 'fast'"),
        ("valkey://a?color=red", "option 'color'"),
        ("valkey://a,b?weights=1", "weights is '1'"),
        ("valkey://a?prefix=a*b", "prefix is 'a*b'"),
        ("valkey://a/0", "has a path"),
        ("valkey://a?ca=/x", "without tls"),
        ("valkey+cluster://a?replicas=1", "a cluster has its own"),
        ("valkey://a?members=/x", "members beside servers"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(url: str, told: str):
    with pytest.raises(ConfigError, match=told.replace("*", r"\*").replace("?", r"\?")):
        check_tier_url(url)


def test_a_password_is_named_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STORE_PASSWORD", "hunter2")
    (tmp_path / "password").write_text("hunter2\n")
    for source in ("env:STORE_PASSWORD", f"file:{tmp_path / 'password'}"):
        found = settings(f"valkey://a?user=kv&password={source}")
        assert found.credentials.password == "hunter2"
        assert "hunter2" not in repr(found)


@pytest.mark.parametrize(
    "url", ["valkey://kv:hunter2@a", "valkey://a?password=hunter2", "valkey://a?user=x&password=env:hunter2:"]
)
def test_a_password_in_the_url_is_refused_without_repeating_it(url: str):
    with pytest.raises(ConfigError) as refused:
        settings(url)
    if "env:" not in url:
        assert "hunter2" not in str(refused.value)


def test_members_come_from_a_file(tmp_path: Path):
    file = tmp_path / "members"
    file.write_text("# ours\ncache-1:6379\n\ncache-2:6379 2.5  # larger\n")
    assert [(s.name, s.weight) for s in read_servers(file)] == [("cache-1:6379", 1.0), ("cache-2:6379", 2.5)]
    file.write_text("a b c\n")
    with pytest.raises(ConfigError, match="members is"):
        read_servers(file)
