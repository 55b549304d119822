"""Weights on a shelf: copies that lie side by side, that live as long as they are used, and that can fail."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from kvstrata.kernels import memory
from kvstrata.kernels.memory import Shelf, huge_pages

MIB = 1 << 20


def numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_what_is_put_down_stays_as_it_was_at_whole_lines_and_apart() -> None:
    shelf = Shelf()
    given = [numbers(size, size) for size in (1, 64, 65, 0, 3 * MIB + 1, 33 * MIB, 7, 30 * MIB, 5 * MIB)]
    kept = [shelf.put(data) for data in given]
    for before, after in zip(given, kept, strict=True):
        assert after.is_contiguous()
        assert after.data_ptr() % 64 == 0
        assert torch.equal(before, after)
    kept[0].zero_()
    kept[4].zero_()
    for place in (1, 2, 5, 6, 7, 8):
        assert torch.equal(given[place], kept[place])


def test_memory_lives_as_long_as_a_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        """One that can be watched."""

    made: list[weakref.ref[Mapping]] = []

    def mapping(*arguments: int, **keywords: int) -> Mapping:
        new = Mapping(*arguments, **keywords)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(memory.mmap, "mmap", mapping)
    shelf = Shelf()
    kept = [shelf.put(numbers(1000)), shelf.put(numbers(2000))]
    assert len(made) == 1
    del shelf, kept[0]
    gc.collect()
    assert torch.equal(kept[0], numbers(2000))
    assert made[0]() is not None
    kept.clear()
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_where_memory_is_short_weights_stay_where_they_are(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*arguments: int, **keywords: int) -> mmap.mmap:
        raise error

    shelf = Shelf()
    first = shelf.put(numbers(20 * MIB))
    monkeypatch.setattr(memory.mmap, "mmap", none_left)
    given = numbers(20 * MIB, 1)
    assert shelf.put(given) is given
    small = numbers(100)
    assert shelf.put(small).data_ptr() == first.data_ptr() + 20 * MIB
    with pytest.raises(type(error)):
        huge_pages(MIB)


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(huge_pages(5000), torch.zeros(5000, dtype=torch.uint8))
