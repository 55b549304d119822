"""A server over Valkey servers: what it tells of each, and its members changed while it runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from metric_text import scrape, value
from served import START, ServerProcess, toy_server
from valkey_servers import ValkeyServer, url_of

from kvstrata.server.keys import KeyRing, parse_keys
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.url import parse_tier_url
from kvstrata.tiers.valkey.settings import ValkeySettings
from kvstrata.tiers.valkey.tier import ValkeyTier

ADMIN = "admin-secret"
PROMPT = "a prompt of some blocks, and then a bit more of it"


def over(url: str) -> Callable[[Any, Any], list[ValkeyTier]]:
    def make(context: Any, clock: Any) -> list[ValkeyTier]:
        settings = ValkeySettings.from_url(parse_tier_url(url))
        return [ValkeyTier(settings, context, clocks=Clocks(clock, time.time))]

    return make


def ring() -> KeyRing:
    return KeyRing((), parse_keys([ADMIN], "test", "admin")[0])


def test_each_server_is_told_by_name(valkeys: list[ValkeyServer]):
    with toy_server(tiers=over(url_of(valkeys, replicas=3))) as server:
        server.post(prompt=PROMPT, max_tokens=1)
        server.until(lambda: not server.toy.engine.settling)
        told = scrape(server)
        for valkey in valkeys:
            labels = {"tier": "valkey", "server": valkey.name}
            assert value(told, "tier_server_state", state="closed", **labels) == 1
            assert value(told, "tier_server_calls_total", **labels) > 0
            assert value(told, "tier_server_stored_bytes_total", **labels) > 0
            assert value(told, "tier_server_errors_total", kind="down", **labels) == 0
        valkeys[0].kill()
        labels = {"tier": "valkey", "server": valkeys[0].name}

        def noticed() -> bool:
            server.post(prompt=PROMPT[::-1], max_tokens=1)
            return value(scrape(server), "tier_server_errors_total", kind="down", **labels) > 0

        server.until(noticed)
        assert value(scrape(server), "tier_server_state", state="closed", **labels) == 0


def test_the_admin_gives_the_tier_other_servers(valkeys: list[ValkeyServer]):
    with toy_server(keys=ring(), tiers=over(url_of(valkeys[:2]))) as server:

        def change(key: str = ADMIN, **body: Any) -> httpx2.Response:
            return server.post("/v1/cache/members", key=key, **body)

        everyone = ",".join(valkey.name for valkey in valkeys)
        assert change(key="none", servers=everyone).status_code in (401, 403)
        told = change(servers=everyone).json()
        assert (told["changed"], set(told["servers"])) == (True, {valkey.name for valkey in valkeys})
        assert change(servers=everyone).json()["changed"] is False
        with server.client(ADMIN) as client:
            [tier] = client.get("/v1/cache").json()["tiers"]
        assert tier["servers"] == {valkey.name: "closed" for valkey in valkeys}
        for wrong in ({"servers": "a b"}, {"servers": f"{everyone},127.0.0.1:1"}, {}, {"servers": ""}):
            answer = change(**wrong)
            assert answer.status_code == 400, answer.text
    with toy_server(keys=ring()) as server:
        assert "this server has 0" in server.post("/v1/cache/members", key=ADMIN, servers="a:1").text


@pytest.mark.slow
def test_a_hangup_reads_the_members_again_and_no_password_is_shown(
    valkeys: list[ValkeyServer], smollm2_path: Path, tmp_path: Path
):
    secret = "a-password-nobody-sees"
    for valkey in valkeys:
        valkey.call("CONFIG", "SET", "requirepass", secret)
    members = tmp_path / "members"
    members.write_text(f"{valkeys[0].name}\n")
    process = ServerProcess(
        *("--model", str(smollm2_path), "--kv-memory", "64MiB", "--max-model-len", "512", "--threads", "1"),
        *("--tier", f"valkey://?members={members}&password=env:STORE_PASSWORD"),
        env={"STORE_PASSWORD": secret},
    )
    try:
        with httpx2.Client(base_url=process.url, timeout=START) as client:
            members.write_text(f"{valkeys[0].name}\n{valkeys[1].name}\n")
            process.signal(signal.SIGHUP)
            while not process.logged("members"):
                time.sleep(0.02)
            [entry] = process.logged("members")
            assert entry["changed"] is True
            assert sorted(entry["servers"]) == sorted(valkey.name for valkey in valkeys[:2])
            members.write_text("nonsense nonsense nonsense\n")
            process.signal(signal.SIGHUP)
            while len(process.logged("members")) < 2:
                time.sleep(0.02)
            assert "members is" in process.logged("members")[1]["error"]
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            shown = client.get("/metrics").text + client.get("/v1/cache").text
        shown += Path(f"/proc/{process.process.pid}/cmdline").read_text()
    finally:
        assert process.stop() == 0
    assert secret not in shown + "".join(process.lines)
