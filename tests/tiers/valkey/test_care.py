"""`kvstrata store` over servers: what is there, whether it is whole, cleaning up, copying to and fro."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stored import CONTEXT, HIT, blocks, drops, misses
from valkey_servers import ValkeyServer, url_of

from kvstrata.cli.app import main
from kvstrata.tiers.open import open_tier


@pytest.fixture
def url(valkeys: list[ValkeyServer]) -> str:
    url = url_of(valkeys)
    tier = open_tier(url, CONTEXT)
    drops(tier, blocks(40))
    drops(tier, blocks(2, chain=1, salt="tenant"))
    tier.close()
    return url


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main(["store", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def value_of(valkeys: list[ValkeyServer], depth: int) -> tuple[ValkeyServer, bytes]:
    key = blocks(depth + 1)[depth].identity.address.key.hex()
    [found] = [(s, n) for s in valkeys for n in s.call("KEYS", f"*{key}*")]  # type: ignore[attr-defined]
    return found


def test_ls_and_stat_tell_what_is_there(url: str, capsys: pytest.CaptureFixture[str]):
    listed = run(capsys, "ls", url)
    assert listed["records"] == 42
    assert sorted(row["depth"] for row in listed["blocks"] if row["salt"] == "tenant") == [0, 1]
    figures = run(capsys, "stat", url)
    assert (figures["records"], figures["faults"]) == (42, {})
    assert figures["used_bytes"] > 42 * CONTEXT.payload_bytes[0]


def test_verify_exits_1_and_names_server_and_key(
    url: str, valkeys: list[ValkeyServer], capsys: pytest.CaptureFixture[str]
):
    assert run(capsys, "verify", url)["good"] == 42
    server, name = value_of(valkeys, 3)
    server.call("SETRANGE", name, 3000, b"damage")
    other, cut = value_of(valkeys, 20)
    other.call("SET", cut, b"short")
    result = run(capsys, "verify", url, code=1)
    assert (result["good"], result["faulty"]) == (40, 2)
    assert {fault["place"]: fault["fault"] for fault in result["faults"]} == {
        f"{server.name} {name.decode()}": "payload_checksum",
        f"{other.name} {cut.decode()}": "length",
    }
    assert run(capsys, "gc", url)["removed"] == {"length": 1}


def test_gc_forgets_a_tenant_and_other_models(url: str, capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "gc", url, "--salt", "tenant")["removed"] == {"salt": 2}
    assert run(capsys, "gc", url, "--keep", "ffff")["removed"] == {"fingerprint": 40}
    assert run(capsys, "stat", url)["records"] == 0


def test_cp_takes_blocks_to_a_folder_and_back_to_where_engines_look(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = f"disk://{tmp_path / 'store'}?size=16MiB"
    assert run(capsys, "cp", url, folder)["copied"] == 42
    assert run(capsys, "cp", folder, f"{url}?prefix=other")["copied"] == 42
    tier = open_tier(f"{url}?prefix=other", CONTEXT)
    assert misses(tier, blocks(40)) == [HIT] * 40
    tier.close()
    assert main(["store", "cp", url, url]) == 1
    assert "give two" in capsys.readouterr().err


def test_servers_that_cannot_be_reached_are_one_clear_line(capsys: pytest.CaptureFixture[str]):
    assert main(["store", "ls", "valkey://127.0.0.1:1"]) == 1
    assert "no valkey server can be reached (127.0.0.1:1: Connection refused)" in capsys.readouterr().err
