"""One forward pass: the scheduled work laid out as tensors, and the rows of logits that come back."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvstrata.cache.manager import KVCache
from kvstrata.cache.retention import FULL, Retention
from kvstrata.cache.table import BlockTable
from kvstrata.engine.work import Work
from kvstrata.models.batch import ForwardBatch, GroupBatch, RetainedBatch


class Model(Protocol):
    """What the runner calls: logits float32 `[num_logits, vocab_size]` of a batch."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute one step, writing K and V to the pools."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, to be computed over the blocks that its tables have.

    tables: one for each layer group. start: position of the first token. logits: rows that are wanted, of
    the last so many tokens. retention: the sequence's.
    """

    tables: Sequence[BlockTable]
    start: int
    tokens: array[int]
    logits: int = 1
    retention: Retention = FULL


@dataclass(frozen=True)
class StepLogits:
    """logits: float32 `[num_logits, vocab_size]`; rows: which of them belong to each work, in order.

    A work has the row of its last known token and of each proposed one after it, or a row for each token
    where all are wanted. Every chunk has its last row, sampled from or not, so that a chunk with non-finite
    values shows.
    """

    logits: Tensor
    rows: tuple[range, ...]


class Runner:
    """Runs scheduled work on a model over the cache's pools."""

    def __init__(self, model: Model, cache: KVCache, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._device = device

    def run(self, works: Sequence[Work]) -> StepLogits:
        """Compute one step: K and V go to the pools, logits come back."""
        return self.compute([_chunk(work) for work in works])

    def compute(self, chunks: Sequence[Chunk]) -> StepLogits:
        """Compute chunks of different sequences together."""
        batch, rows = self._lay_out(chunks)
        return StepLogits(self._model.forward(batch), rows)

    def _lay_out(self, chunks: Sequence[Chunk]) -> tuple[ForwardBatch, tuple[range, ...]]:
        counts = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
        ends = np.cumsum(counts)
        begins = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        rows = np.repeat(np.arange(len(chunks)), counts)  # the chunk of each token
        positions = np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)
        token_ids = array("I")
        for chunk in chunks:
            token_ids += chunk.tokens
        wanted = np.array([chunk.logits for chunk in chunks], dtype=np.int64)
        wanted_ends = np.cumsum(wanted)
        logit_rows = np.arange(wanted_ends[-1]) + np.repeat(ends - wanted_ends, wanted)
        batch = ForwardBatch(
            token_ids=self._to_device(np.frombuffer(token_ids, dtype=np.uint32).astype(np.int64)),
            positions=self._to_device(positions),
            query_starts=self._to_device(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._to_device((begins + counts).astype(np.int32)),
            logit_rows=self._to_device(logit_rows),
            groups=tuple(
                self._group(group, chunks, rows, positions) for group in range(len(self._cache.pools))
            ),
            retained=self._retained(chunks, rows, positions),
        )
        return batch, tuple(itertools.starmap(range, itertools.pairwise([0, *wanted_ends.tolist()])))

    def _group(
        self, group: int, chunks: Sequence[Chunk], rows: np.ndarray, positions: np.ndarray
    ) -> GroupBatch:
        """rows, positions: of each token, the chunk it belongs to and its place in the sequence."""
        size = self._cache.block_size
        counts = [-(-(chunk.start + len(chunk.tokens)) // size) for chunk in chunks]
        tables = np.full((len(chunks), max(counts)), -1, dtype=np.int32)
        for table, chunk, count in zip(tables, chunks, counts, strict=True):
            table[:count] = chunk.tables[group][:count]
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        pool = self._cache.pools[group]
        return GroupBatch(pool.kv, self._to_device(tables), self._to_device(slots), pool.scales)

    def _retained(
        self, chunks: Sequence[Chunk], rows: np.ndarray, positions: np.ndarray
    ) -> RetainedBatch | None:
        """rows, positions: as for `_group`."""
        seen = [chunk.retention for chunk in chunks]
        if all(retention.is_full for retention in seen):
            return None
        windows = np.array([retention.window or 0 for retention in seen], dtype=np.int32)
        sinks = np.array([retention.sinks for retention in seen], dtype=np.int32)
        reach = (windows.astype(np.int64) + sinks)[rows]
        hides = (sinks[rows] > 0) & (positions >= reach)
        within = np.where(sinks[rows] > 0, np.minimum(positions, reach - 1), positions)
        return RetainedBatch(
            self._to_device(windows),
            self._to_device(sinks),
            self._to_device(within) if hides.any() else None,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _chunk(work: Work) -> Chunk:
    sequence = work.sequence
    assert sequence.cache is not None
    tokens = sequence.chain.tokens[work.start : work.start + work.count]
    if work.draft:
        tokens.extend(work.draft)
    wanted = work.count if wants_all_logits(work) else 1 + len(work.draft)
    return Chunk(sequence.cache.tables, work.start, tokens, wanted, sequence.chain.retention)


def wants_all_logits(work: Work) -> bool:
    """Whether the log-probabilities of the work's prompt tokens were asked for and are not there yet."""
    return not work.sequence.request.takes_hits and not work.sequence.output_ids
