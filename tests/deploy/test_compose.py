"""The compose file: three servers of the store, two engines, and URLs that the engines take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def tier_of(engine: dict[str, Any]) -> str:
    [url] = [word for word in engine["command"] if word.startswith("valkey://")]
    return str(url)


def test_engines_name_the_servers_that_are_there(services: dict[str, Any]):
    servers = {name for name, service in services.items() if "valkey-server" in str(service["command"])}
    engines = [service for name, service in services.items() if name not in servers]
    assert (len(servers), len(engines)) == (3, 2)
    assert len({tier_of(engine) for engine in engines}) == 1
    for engine in engines:
        url = parse_tier_url(tier_of(engine))
        secret = url.options.pop("password")
        assert secret == "file:/run/secrets/store_password"
        settings = ValkeySettings.from_url(url)
        assert {server.host for server in settings.servers} == servers
        assert settings.replicas == 2


def test_servers_keep_nothing_on_disk_and_evict(services: dict[str, Any]):
    words = services["valkey-1"]["command"]
    assert '--save ""' in words
    assert "--appendonly no" in words
    assert "--maxmemory-policy allkeys-lfu" in words
