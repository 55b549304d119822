"""Runs a decoder over a paged pool with shuffled block tables, in whatever steps a test asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.decoder import Decoder


class PagedRun:
    """Sequences over one pool a layer group; unused slots hold NaN, and blocks lie in random order."""

    def __init__(
        self,
        decoder: Decoder,
        lengths: Sequence[int],
        block_size: int = 16,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._block_size = block_size
        self._done = [0] * len(lengths)
        per_sequence = -(-max(lengths) // block_size)
        num_blocks = per_sequence * len(lengths) + 3
        generator = torch.Generator().manual_seed(seed)
        self._pools = []
        self._tables = []
        for _, layers in config.layer_groups():
            shape = (num_blocks, len(layers), 2, config.num_kv_heads, block_size, config.head_dim)
            self._pools.append(torch.full(shape, torch.nan, dtype=kv_dtype))
            order = torch.randperm(num_blocks, generator=generator)[: per_sequence * len(lengths)]
            self._tables.append(order.view(len(lengths), per_sequence).int())

    def step(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Feed each sequence its next tokens (maybe none); their log-probabilities."""
        counts = [len(ids) for ids in tokens]
        before = list(self._done)
        self._done = [done + count for done, count in zip(before, counts, strict=True)]
        positions = [torch.arange(b, d) for b, d in zip(before, self._done, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        groups = []
        for (window, _), pool, tables in zip(
            self._decoder.config.layer_groups(), self._pools, self._tables, strict=True
        ):
            visible = tables.clone()
            for row, (first, end) in enumerate(zip(before, self._done, strict=True)):
                visible[row, -(-end // self._block_size) :] = -1
                if window is not None:
                    visible[row, : max(0, first - window + 1) // self._block_size] = -1
            slots = [
                tables[row][p // self._block_size].long() * self._block_size + p % self._block_size
                for row, p in enumerate(positions)
            ]
            groups.append(GroupBatch(pool, visible, torch.cat(slots)))
        batch = ForwardBatch(
            token_ids=torch.tensor([token for ids in tokens for token in ids], dtype=torch.int64),
            positions=torch.cat(positions),
            query_starts=starts.int(),
            context_lens=torch.tensor(self._done, dtype=torch.int32),
            logit_rows=torch.arange(sum(counts)),
            groups=tuple(groups),
        )
        return list(self._decoder.forward(batch).log_softmax(-1).split(counts))
