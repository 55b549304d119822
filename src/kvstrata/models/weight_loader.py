"""Fills a decoder's weights from a `WeightSource`: dense in a float dtype, or packed for the native kernels.

A loader first hands out products, norms and the embedding, still empty, and then fills them all in one run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from kvstrata.errors import ModelError
from kvstrata.kernels.memory import Shelf
from kvstrata.kernels.packing import PackedWeight, Target, pack
from kvstrata.models.dequantize import dequantize
from kvstrata.models.linear import (
    DenseEmbedding,
    DenseLinear,
    Embedding,
    Linear,
    PackedEmbedding,
    PackedLinear,
)
from kvstrata.models.weights import RawTensor, WeightSource

Progress = Callable[[int, int], None]

# Dequantising is a third Python, which only one thread runs at a time.
_MAX_THREADS: Final = 4
# Elements dequantised before they are copied: the detour stays small beside the largest tensor.
_PIECE: Final = 1 << 20


class Loader(Protocol):
    """Hands out weights to be filled by `run`; names are without `.weight` and `.bias`."""

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """The product with the weights of `names`, `[size, inputs]` each, laid end to end."""

    def embedding(self, vocab_size: int, hidden_size: int, *, tied: bool) -> tuple[Embedding, Linear]:
        """The embedding and the head, over one table where they are tied."""

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's weights, float32 `[size]`."""

    def run(self, progress: Progress | None) -> None:
        """Fill everything that was handed out. Raises ModelError."""


class _Jobs:
    """What is to be read, and the reading: each tensor's shape is checked before it is used."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._present = frozenset(source.names())
        self._jobs: list[tuple[str, tuple[int, ...], Callable[[RawTensor], None]]] = []

    def add(self, name: str, shape: tuple[int, ...], use: Callable[[RawTensor], None]) -> None:
        if name not in self._present:
            raise ModelError(f"tensor {name} is missing: the file is incomplete or of another model")
        self._jobs.append((name, shape, use))

    def copy(self, name: str, target: Tensor) -> None:
        """Have the tensor dequantised into `target`."""
        self.add(name, tuple(target.shape), lambda raw: _copy(raw, target))

    def run(self, progress: Progress | None, threads: int) -> None:
        lock = threading.Lock()
        done = 0

        def read(name: str, shape: tuple[int, ...], use: Callable[[RawTensor], None]) -> None:
            nonlocal done
            raw = self._source.raw(name)
            if raw.shape != shape:
                raise ModelError(
                    f"tensor {name} has shape {list(raw.shape)}, the configuration says {list(shape)}: "
                    "the file is damaged or of another model"
                )
            use(raw)
            with lock:
                done += 1
                if progress is not None:
                    progress(done, len(self._jobs))

        with ThreadPoolExecutor(max_workers=threads) as pool:
            futures = [pool.submit(read, *job) for job in self._jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class DenseLoader:
    """Weights in one float dtype, one copy of each."""

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._jobs = _Jobs(source)
        self._device = device
        self._dtype = dtype

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """See `Loader.linear`."""
        return DenseLinear(self._matrix(names, sizes, inputs), self._bias(names, sizes) if bias else None)

    def embedding(self, vocab_size: int, hidden_size: int, *, tied: bool) -> tuple[Embedding, Linear]:
        """See `Loader.embedding`."""
        table = self._matrix(("embed",), (vocab_size,), hidden_size)
        head = table if tied else self._matrix(("head",), (vocab_size,), hidden_size)
        return DenseEmbedding(table), DenseLinear(head)

    def norm(self, name: str, size: int) -> Tensor:
        """See `Loader.norm`."""
        return _norm(self._jobs, name, size, self._device)

    def run(self, progress: Progress | None) -> None:
        """See `Loader.run`."""
        self._jobs.run(progress, min(_MAX_THREADS, os.cpu_count() or 1))

    def _matrix(self, names: Sequence[str], sizes: Sequence[int], inputs: int) -> Tensor:
        weight = torch.empty((sum(sizes), inputs), dtype=self._dtype, device=self._device)
        for name, part in zip(names, weight.split_with_sizes(list(sizes)), strict=True):
            self._jobs.copy(f"{name}.weight", part)
        return weight

    def _bias(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
        return _bias(
            self._jobs, names, sizes, torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        )


class PackedLoader:
    """Weights packed for the native kernels. target: `auto` keeps the file's bits, `int8`, `int4`.

    Embedding and head are never below 8 bits unless the file has them so: they cost little and lose most.
    """

    def __init__(self, source: WeightSource, device: torch.device, target: Target) -> None:
        self._jobs = _Jobs(source)
        self._device = device
        self._target = target
        self._shelf = Shelf()

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """See `Loader.linear`."""
        biases = None
        if bias:
            biases = _bias(self._jobs, names, sizes, torch.empty(sum(sizes), device=self._device))
        return PackedLinear(self._packed(names, sizes, inputs, self._target), biases)

    def embedding(self, vocab_size: int, hidden_size: int, *, tied: bool) -> tuple[Embedding, Linear]:
        """See `Loader.embedding`."""
        target: Target = "auto" if self._target == "auto" else "int8"
        table = self._packed(("embed",), (vocab_size,), hidden_size, target)
        head = table if tied else self._packed(("head",), (vocab_size,), hidden_size, target)
        return PackedEmbedding(table), PackedLinear(head)

    def norm(self, name: str, size: int) -> Tensor:
        """See `Loader.norm`."""
        return _norm(self._jobs, name, size, self._device)

    def run(self, progress: Progress | None) -> None:
        """See `Loader.run`."""
        self._jobs.run(progress, 1)  # packing uses all cores by itself

    def _packed(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, target: Target
    ) -> list[PackedWeight]:
        weights = [PackedWeight(torch.empty(0, dtype=torch.uint8), 0, 0)] * len(names)

        def fill(place: int) -> Callable[[RawTensor], None]:
            def use(raw: RawTensor) -> None:
                packed = pack(raw.format, raw.shape, raw.data, target=target, row_order=raw.row_order)
                weights[place] = replace(packed, data=self._shelf.put(packed.data))

            return use

        for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
            self._jobs.add(f"{name}.weight", (size, inputs), fill(place))
        return weights


def _norm(jobs: _Jobs, name: str, size: int, device: torch.device) -> Tensor:
    weight = torch.empty(size, dtype=torch.float32, device=device)
    jobs.copy(f"{name}.weight", weight)
    return weight


def _bias(jobs: _Jobs, names: Sequence[str], sizes: Sequence[int], bias: Tensor) -> Tensor:
    for name, part in zip(names, bias.split_with_sizes(list(sizes)), strict=True):
        jobs.copy(f"{name}.bias", part)
    return bias


def _copy(raw: RawTensor, target: Tensor) -> None:
    """Dequantise a tensor into place, a few rows at a time so that no second copy of it exists."""
    if target.dim() == 1:
        target.copy_(dequantize(raw.data, raw.format, raw.shape))
        return
    num_rows, inputs = raw.shape
    step = max(1, _PIECE // inputs)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        data = raw.data[rows] if raw.row_order is None else raw.data[raw.row_order[rows]]
        target[rows].copy_(dequantize(data, raw.format, (len(data), inputs)))
