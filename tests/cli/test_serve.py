"""Where the server's settings come from, and how mistakes in them are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.cli import app as cli_app
from kvstrata.cli.sources import masked

Shown = Callable[..., dict[str, object]]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "API_KEYS", "ADMIN_KEY", "METRICS_KEY", "TIERS", "PORT", "KV_MEMORY", "DEBUG"):
        monkeypatch.delenv(f"KVSTRATA_{name}", raising=False)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    def shown(*arguments: str) -> dict[str, object]:
        assert cli_app.main(["serve", "--print-config", "--json", *arguments]) == 0
        settings: dict[str, object] = json.loads(capsys.readouterr().out)["settings"]
        return settings

    return shown


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "kvstrata.toml"
    file.write_text(
        "port = 1001\nmax_queue = 5\nkv_memory = 67108864\nprefix_caching = false\nbody_timeout = 3\n"
    )
    config = ("--config", str(file))
    assert shown()["port"] == 8000
    assert shown(*config)["port"] == 1001
    monkeypatch.setenv("KVSTRATA_PORT", "1002")
    assert shown(*config)["port"] == 1002
    assert shown(*config, "--port", "1003")["port"] == 1003
    settings = shown(*config, "--prefix-caching")
    assert (settings["max_queue"], settings["kv_memory"], settings["prefix_caching"]) == (5, "67108864", True)
    monkeypatch.setenv("KVSTRATA_CONFIG", str(file))
    assert shown()["max_queue"] == 5


def test_truths_come_from_the_environment_in_words(shown: Shown, monkeypatch: pytest.MonkeyPatch):
    for text, value in (("true", True), ("0", False), ("Yes", True), ("off", False)):
        monkeypatch.setenv("KVSTRATA_LOG_PROMPTS", text)
        assert shown()["log_prompts"] is value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", "'prot'"),
        ("[server]\nport = 1", "'server'"),
        ("port = 'many'", "port is 'many'"),
        ("port = 70000", "port is 70000"),
        ("log_prompts = 1", "log_prompts is 1"),
        ("= 1", "no TOML"),
        ("port = " + "9" * 5000, "no TOML"),
        ("port = " + "[" * 5000, "no TOML"),
        ('api_key_file = "a\\u0000"', "api_key_file is 'a\\x00'"),
        ('chat_template = "a\\u0000"', "chat_template is 'a\\x00'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(text, told, tmp_path, capsys):
    file = tmp_path / "kvstrata.toml"
    file.write_text(text)
    assert cli_app.main(["serve", "--print-config", "--config", str(file)]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    if "no TOML" not in told and "is" not in told:
        assert "max_queue" in error  # the known ones are named


def test_a_mistake_is_told_in_the_words_of_its_source(monkeypatch, capsys):
    assert cli_app.main(["serve", "--print-config", "--kv-memory", "some"]) == 2
    assert "--kv-memory is 'some'" in capsys.readouterr().err
    monkeypatch.setenv("KVSTRATA_KV_MEMORY", "some")
    assert cli_app.main(["serve", "--print-config"]) == 1
    assert "KVSTRATA_KV_MEMORY is 'some'" in capsys.readouterr().err
    monkeypatch.setenv("KVSTRATA_KV_MEMORY", "1GiB")
    monkeypatch.setenv("KVSTRATA_PORT", "many")
    assert cli_app.main(["serve", "--print-config"]) == 1
    assert "KVSTRATA_PORT is 'many'" in capsys.readouterr().err


def test_the_settings_are_printed_with_their_sources_and_without_secrets(monkeypatch, capsys):
    monkeypatch.setenv("KVSTRATA_API_KEYS", "alice:alice-secret")
    monkeypatch.setenv("KVSTRATA_ADMIN_KEY", "admin-secret")
    monkeypatch.setenv("KVSTRATA_MAX_QUEUE", "7")
    assert cli_app.main(["serve", "--print-config", "--port", "9"]) == 0
    told = capsys.readouterr().err
    assert "port = 9  (flag)" in told
    assert "max_queue = 7  (environment)" in told
    assert "keys = alice, admin" in told
    assert "secret" not in told


def test_addresses_are_shown_without_what_they_hide():
    assert masked("valkey://me:word@host:6379?replicas=2") == "valkey://***@host:6379?replicas=2"
    assert masked(["disk:///x?hmac_key=abc&size=1GiB"]) == ["disk:///x?hmac_key=***&size=1GiB"]
    assert masked(5) == 5


def test_a_template_comes_from_a_file(shown: Shown, tmp_path: Path, capsys):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert shown("--chat-template", str(file))["chat_template"] == "{{ messages }}"
    assert cli_app.main(["serve", "--print-config", "--chat-template", str(tmp_path / "none")]) == 1
    assert "chat_template is" in capsys.readouterr().err


def test_tiers_are_given_as_to_every_other_command(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    two = ["ram://?size=1GiB", "disk:///cache?size=2GiB"]
    assert shown("--tier", two[0], "--tier", two[1])["tiers"] == two
    monkeypatch.setenv("KVSTRATA_TIERS", " ".join(two))
    assert shown()["tiers"] == two
    monkeypatch.delenv("KVSTRATA_TIERS")
    file = tmp_path / "kvstrata.toml"
    file.write_text(f"tiers = {json.dumps(two)}\n")
    assert shown("--config", str(file))["tiers"] == two
    assert cli_app.main(["serve", "--print-config", "--tiers", two[0]]) == 2
    capsys.readouterr()
    assert cli_app.main(["serve", "--print-config", "--tier", two[0], "--no-prefix-caching"]) == 2
    assert "--tier is" in capsys.readouterr().err


def test_the_metrics_key_is_one_of_its_own(shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "metrics-key"
    file.write_text("scrape-secret\n")
    assert shown("--metrics-key-file", str(file))["metrics_key_file"] == str(file)
    monkeypatch.setenv("KVSTRATA_METRICS_KEY", "another-secret")
    assert cli_app.main(["serve", "--print-config", "--metrics-key-file", str(file)]) == 1
    monkeypatch.setenv("KVSTRATA_ADMIN_KEY", "another-secret")
    assert cli_app.main(["serve", "--print-config"]) == 1  # one secret, two purposes


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example", "a\0b", "256.1.1.1"])
def test_a_host_that_cannot_be_one_is_told_in_one_line(host: str, capsys: pytest.CaptureFixture[str]):
    assert cli_app.main(["serve", "--port", "0", "--insecure", "--host", host]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: host is {host!r}; it is no address of this machine")


@pytest.mark.parametrize(
    "text", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\n\n-----END CERTIFICATE-----\n"]
)
def test_tls_files_that_are_none_show_before_a_model_is_loaded(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pem = tmp_path / "server.pem"
    pem.write_bytes(text)
    arguments = ("--port", "0", "--tls-cert", str(pem), "--tls-key", str(pem))
    assert cli_app.main(["serve", "--model", "/no/such/model", *arguments]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: tls_cert is {str(pem)!r} and tls_key is {str(pem)!r}; give PEM files")


def test_the_help_tells_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_app.main(["serve", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "0 takes a free one. [8000]" in told
    assert "Find the blocks of earlier requests again. [on]" in told
    assert "[None]" not in told
    assert "[False]" not in told
