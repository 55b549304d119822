"""Slots of memory: populated before they are used, and never changed by that."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvstrata.tiers import memory as memory_module
from kvstrata.tiers.arena import SlotArena
from kvstrata.tiers.memory import available_bytes

SIZE = 48 << 20
STATM = Path("/proc/self/statm")


def test_populating_makes_all_pages_resident_and_keeps_their_bytes() -> None:
    if not STATM.exists():
        pytest.skip("the system does not tell which memory is resident")
    arena = SlotArena((5000, 300_000), SIZE, "size")
    first = arena.view(1, 0)
    first[:] = np.arange(first.size, dtype=np.uint8)
    before = int(STATM.read_text().split()[1])
    portions = sum(1 for _ in arena.populate())
    if not portions:
        pytest.skip("the system does not populate memory, or has little left")
    grown = (int(STATM.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE")
    assert grown > SIZE * 3 // 4
    assert np.array_equal(first, np.arange(first.size, dtype=np.uint8))


def test_populating_stops_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "total_bytes", lambda device: available_bytes(device) * 5)
    assert list(SlotArena((5000,), SIZE, "size").populate()) == []


def test_populating_stops_where_a_control_group_leaves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: 1 << 20)
    assert list(SlotArena((5000,), SIZE, "size").populate()) == []
