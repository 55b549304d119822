"""Running the native kernels with each instruction set and number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvstrata import kernels
from kvstrata.kernels.native import INSTRUCTION_SETS

needs_native = pytest.mark.skipif(
    kernels.backend() == "reference", reason="the native kernels were not built"
)


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    before = torch.ops.kvstrata.instruction_set()
    torch.ops.kvstrata.use_instruction_set(name)
    try:
        yield
    finally:
        torch.ops.kvstrata.use_instruction_set(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def supported() -> list[str]:
    names = []
    for name in INSTRUCTION_SETS:
        try:
            with instruction_set(name):
                names.append(name)
        except ValueError:
            continue
    return names


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 4: torch.int32, 2: torch.int16, 8: torch.int64}[x.element_size()]
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def as_met(query: Tensor, dtype: torch.dtype) -> Tensor:
    """A query as the native kernels multiply it with keys of a pool: by bf16 where the pool is bf16."""
    return query.bfloat16().float() if dtype == torch.bfloat16 else query


def tolerance(dtype: torch.dtype, values: float = 5.0) -> float:
    """How far attention may be from exact; values: the largest of the pool.

    Weights of a bf16 pool are rounded to bf16, each by a 512th of it at most, which moves a weighted mean of
    values by less than a 256th of the largest.
    """
    return values / 256 if dtype == torch.bfloat16 else 1e-5


def everywhere(run: Callable[[], Tensor]) -> Tensor:
    """The result of `run`, once it is the same on every instruction set with 1 and 2 threads."""
    results = {}
    for name in supported():
        for count in (1, 2):
            with instruction_set(name), threads(count):
                results[name, count] = run()
    first_key, first = next(iter(results.items()))
    for key, result in results.items():
        assert same_bits(first, result), f"{key} differs from {first_key}"
    return first
