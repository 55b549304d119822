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
from kvstrata.engine.scheduler import Work
from kvstrata.models.batch import ForwardBatch, GroupBatch, RetainedBatch


class Model(Protocol):
    """What the runner calls: logits float32 `[num_logits, vocab_size]` of a batch."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute one step, writing K and V to the pools."""


@dataclass(frozen=True)
class StepLogits:
    """logits: float32 `[num_logits, vocab_size]`; rows: which of them belong to each work, in order.

    A work has the row of its last token, or a row for each token where all are wanted. Every chunk has its
    last row, sampled from or not, so that a chunk with non-finite values shows.
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
        batch, rows = self._lay_out(works)
        return StepLogits(self._model.forward(batch), rows)

    def _lay_out(self, works: Sequence[Work]) -> tuple[ForwardBatch, tuple[range, ...]]:
        counts = np.array([work.count for work in works], dtype=np.int64)
        ends = np.cumsum(counts)
        begins = np.array([work.start for work in works], dtype=np.int64)
        rows = np.repeat(np.arange(len(works)), counts)  # the work of each token
        positions = np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)
        token_ids = array("I")
        for work in works:
            token_ids += work.sequence.chain.tokens[work.start : work.start + work.count]
        wanted = np.array([work.count if wants_all_logits(work) else 1 for work in works], dtype=np.int64)
        wanted_ends = np.cumsum(wanted)
        logit_rows = np.arange(wanted_ends[-1]) + np.repeat(ends - wanted_ends, wanted)
        batch = ForwardBatch(
            token_ids=self._to_device(np.frombuffer(token_ids, dtype=np.uint32).astype(np.int64)),
            positions=self._to_device(positions),
            query_starts=self._to_device(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._to_device((begins + counts).astype(np.int32)),
            logit_rows=self._to_device(logit_rows),
            groups=tuple(
                self._group(group, works, rows, positions) for group in range(len(self._cache.pools))
            ),
            retained=self._retained(works, rows, positions),
        )
        return batch, tuple(itertools.starmap(range, itertools.pairwise([0, *wanted_ends.tolist()])))

    def _group(
        self, group: int, works: Sequence[Work], rows: np.ndarray, positions: np.ndarray
    ) -> GroupBatch:
        """rows, positions: of each token, the work it belongs to and its place in the sequence."""
        size = self._cache.block_size
        counts = [-(-(work.start + work.count) // size) for work in works]
        tables = np.full((len(works), max(counts)), -1, dtype=np.int32)
        for table, work, count in zip(tables, works, counts, strict=True):
            assert work.sequence.cache is not None
            table[:count] = work.sequence.cache.tables[group][:count]
        slots = tables[rows, positions // size].astype(np.int64) * size + positions % size
        pool = self._cache.pools[group]
        return GroupBatch(pool.kv, self._to_device(tables), self._to_device(slots), pool.scales)

    def _retained(
        self, works: Sequence[Work], rows: np.ndarray, positions: np.ndarray
    ) -> RetainedBatch | None:
        """rows, positions: as for `_group`."""
        seen = [work.sequence.chain.retention for work in works]
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


def wants_all_logits(work: Work) -> bool:
    """Whether the log-probabilities of the work's prompt tokens were asked for and are not there yet."""
    return not work.sequence.request.takes_hits and not work.sequence.output_ids
