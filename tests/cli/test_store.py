"""`kvstrata store` from outside: one JSON object, exit codes, and what it says of a damaged store."""

import json
from pathlib import Path

import pytest
from faulty_files import files_of
from stored import CONTEXT, blocks, drops, options

from kvstrata.cli.app import main
from kvstrata.errors import ConfigError
from kvstrata.tiers.disk import DiskTier


@pytest.fixture
def url(tmp_path: Path) -> str:
    tier = DiskTier(options(tmp_path), CONTEXT)
    drops(tier, blocks(3))
    drops(tier, blocks(2, chain=1, salt="tenant"))
    tier.close()
    return f"disk://{tmp_path / 'store'}"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main(["store", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_ls_and_stat_tell_what_is_there(url: str, capsys: pytest.CaptureFixture[str]):
    listed = run(capsys, "ls", url)
    assert [(row["depth"], row["salt"]) for row in listed["blocks"]] == [
        (0, ""),
        (1, ""),
        (2, ""),
        (0, "tenant"),
        (1, "tenant"),
    ]
    assert run(capsys, "ls", url, "--salt", "tenant")["records"] == 2
    assert len(run(capsys, "ls", url, "--limit", "1")["blocks"]) == 1
    figures = run(capsys, "stat", url)
    assert figures["records"] == 5
    assert set(figures["salts"]) == {"", "tenant"}


def test_verify_exits_1_and_names_the_damaged_record(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(capsys, "verify", url)["good"] == 5
    with files_of(tmp_path, "payloads").open("r+b") as file:
        file.write(b"?")
    result = run(capsys, "verify", url, code=1)
    assert (result["good"], result["faulty"]) == (4, 1)
    assert (result["faults"][0]["slot"], result["faults"][0]["fault"]) == (0, "payload_checksum")


def test_gc_forgets_a_tenant_and_old_blocks(url: str, capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "gc", url, "--salt", "tenant")["removed"] == {"salt": 2}
    assert run(capsys, "gc", url, "--older-than", "1h")["kept"] == 3
    assert run(capsys, "gc", url, "--keep", "ff")["removed"] == {"fingerprint": 3}
    assert run(capsys, "stat", url)["records"] == 0


def test_cp_copies_and_people_can_read_it(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = f"disk://{tmp_path / 'copy'}"
    assert run(capsys, "cp", url, target + "?size=1MiB")["copied"] == 5
    for command in ("ls", "stat", "verify", "gc"):
        assert main(["store", command, target]) == 0
    assert "5 records are whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls", "ram://?size=1GiB"], "keeps nothing that another process could look at"),
        (
            ["cp", "ram://?size=1GiB", "disk:///tmp/x?size=1GiB"],
            "keeps nothing that another process could look at",
        ),
        (["ls", "nothing"], "no URL"),
        (["stat", "disk:///no/such/folder"], "holds no store"),
    ],
)
def test_what_cannot_be_looked_at_is_one_clear_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["store", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("salt", ["[/x]", "[bold]", "\x1b[31mred", "line\nline"])
def test_a_salt_is_shown_as_it_is_and_does_nothing_to_the_terminal(
    salt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    tier = DiskTier(options(tmp_path), CONTEXT)
    drops(tier, blocks(1, salt=salt))
    tier.close()
    for command in ("ls", "stat"):
        assert main(["store", command, f"disk://{tmp_path / 'store'}"]) == 0
        out = capsys.readouterr().out
        assert (salt if salt.isprintable() else repr(salt)[1:-1]) in out
        assert "\x1b" not in out


def test_a_folder_that_is_named_twice_is_told_as_that(tmp_path: Path):
    tier = DiskTier(options(tmp_path), CONTEXT)
    with pytest.raises(ConfigError, match="in use by this process already; name a folder once"):
        DiskTier(options(tmp_path), CONTEXT)
    tier.close()
