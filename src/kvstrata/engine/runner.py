"""One forward pass: the scheduled work laid out as tensors, and the rows of logits that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvstrata.cache.manager import KVCache
from kvstrata.engine.scheduler import Work
from kvstrata.models.batch import ForwardBatch, GroupBatch


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
        starts = np.zeros(len(works) + 1, dtype=np.int32)
        np.cumsum([work.count for work in works], out=starts[1:])
        token_ids = np.empty(starts[-1], dtype=np.int64)
        positions = np.empty(starts[-1], dtype=np.int64)
        logit_rows: list[np.ndarray] = []
        for work, begin, end in zip(works, starts, starts[1:], strict=False):
            token_ids[begin:end] = work.sequence.chain.tokens[work.start : work.start + work.count]
            positions[begin:end] = np.arange(work.start, work.start + work.count)
            logit_rows.append(np.arange(begin if wants_all_logits(work) else end - 1, end, dtype=np.int64))
        batch = ForwardBatch(
            token_ids=self._to_device(token_ids),
            positions=self._to_device(positions),
            query_starts=self._to_device(starts),
            context_lens=self._to_device(np.array([w.start + w.count for w in works], dtype=np.int32)),
            logit_rows=self._to_device(np.concatenate(logit_rows)),
            groups=tuple(
                self._group(group, works, starts, positions) for group in range(len(self._cache.pools))
            ),
        )
        ends = np.cumsum([len(r) for r in logit_rows]).tolist()
        return batch, tuple(range(end - len(r), end) for r, end in zip(logit_rows, ends, strict=True))

    def _group(
        self, group: int, works: Sequence[Work], starts: np.ndarray, positions: np.ndarray
    ) -> GroupBatch:
        size = self._cache.block_size
        counts = [-(-(work.start + work.count) // size) for work in works]
        tables = np.full((len(works), max(counts)), -1, dtype=np.int32)
        slots = np.empty(len(positions), dtype=np.int64)
        for row, (work, count) in enumerate(zip(works, counts, strict=True)):
            assert work.sequence.cache is not None
            tables[row, :count] = work.sequence.cache.tables[group][:count]
            own = positions[starts[row] : starts[row + 1]]
            slots[starts[row] : starts[row + 1]] = (
                tables[row, own // size].astype(np.int64) * size + own % size
            )
        return GroupBatch(self._cache.pools[group].kv, self._to_device(tables), self._to_device(slots))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def wants_all_logits(work: Work) -> bool:
    """Whether the log-probabilities of the work's prompt tokens were asked for and are not there yet."""
    return not work.sequence.request.takes_hits and not work.sequence.output_ids
