"""How large the pool may be: the tightest limit of machine and cgroup counts."""

from pathlib import Path

import pytest
import torch

from kvstrata.engine.build import auto_pool_bytes
from kvstrata.tiers import memory

CPU = torch.device("cpu")


def cgroup(folder: Path, limit: str, used: int) -> Path:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    return folder


def test_a_cgroup_limit_below_the_machines_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", cgroup(tmp_path, str(100 << 20), 40 << 20))
    assert memory.available_bytes(CPU) == 60 << 20


def test_a_cgroup_without_a_limit_leaves_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", cgroup(tmp_path, "max", 40 << 20))
    assert memory.available_bytes(CPU) > 60 << 20


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", cgroup(tmp_path, "1000", 2000))
    assert memory.available_bytes(CPU) == 0


def test_no_more_than_is_useful() -> None:
    assert auto_pool_bytes(1 << 30, 1 << 20) == 1 << 20
    assert auto_pool_bytes(1 << 30, 1 << 40) < 1 << 30


def test_file_pages_that_can_go_are_no_use_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cgroup(tmp_path, str(100 << 20), 90 << 20)
    (folder / "memory.stat").write_text(f"anon 1000\ninactive_file {70 << 20}\nactive_file 5\n")
    monkeypatch.setattr(memory, "_CGROUP", folder)
    assert memory.available_bytes(CPU) == 80 << 20
    assert memory.total_bytes(CPU) == 100 << 20
