"""The input of one forward pass: tokens of many sequences laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupBatch:
    """What one layer group needs of this step.

    kv: the group's pool, `[num_blocks, group_layers, 2, num_kv_heads, block_size, head_dim]`; scales: a
    quantised pool's (see `kernels.kv_formats`).
    block_tables: int32 `[num_seqs, max_blocks]`, physical blocks by position; -1 where there is none (past
    the end, or slipped out of a window). slots: int64 `[num_tokens]`, block * block_size + offset, where
    each token's K and V go.
    """

    kv: Tensor
    block_tables: Tensor
    slots: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class RetainedBatch:
    """What the tokens of a step see in full-attention layers, where some do not see all before them.

    windows: int32 `[num_seqs]`, tokens that a sequence's queries see, 0 for all; sinks: int32 `[num_seqs]`,
    how many of its first tokens besides. sink_positions: int64 `[num_tokens]`, what a token's query is
    rotated to where it meets the sinks; None where no token hides others after sinks.
    """

    windows: Tensor
    sinks: Tensor
    sink_positions: Tensor | None


@dataclass(frozen=True)
class ForwardBatch:
    """One step's tokens, in sequence order.

    token_ids, positions: int64 `[num_tokens]`. query_starts: int32 `[num_seqs + 1]`, where each sequence's
    tokens begin; context_lens: int32 `[num_seqs]`, tokens of each sequence that the pool holds once this
    step's are written. logit_rows: int64 `[num_logits]`, rows whose logits are wanted. groups: in the order
    of `DecoderConfig.layer_groups` as the decoder has them. retained: None where every token sees all before
    it.
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    groups: tuple[GroupBatch, ...]
    retained: RetainedBatch | None = None
