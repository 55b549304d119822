"""Paged attention in plain torch: gather visible blocks, then dense products.

What depends on the batch alone (which blocks to gather, what each row may see) is the same for every layer
of a group, so an `AttentionPlan` works it out once a step and is then applied to each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvstrata.kernels.checks import expect_dtype, expect_shape
from kvstrata.kernels.kv_formats import dequantise, expect_pool, head_size, rotate

_OPERATOR = "paged_attention"
# Rows of one sequence taken at a time: fewer rows waste less on keys after them, more rows gather less often.
_MAX_ROWS = 256
# From here on a sequence's rows fill the tiles of the fused kernel; below, a few rows of many sequences share
# one batched product.
_MIN_FUSED_ROWS = 16
# Float32 bytes gathered at a time: what stays in the caches between gathering and the products.
_GATHER_BYTES = 8 << 20
# Sequences share a batched product while padding stays below this share of the longest.
_MAX_PADDING = 0.2


@dataclass(frozen=True)
class _Span:
    """Consecutive query rows of one sequence and the blocks in which they see tokens.

    sinks: first tokens that they see besides their window; 0 where no row hides anything.
    """

    sequence: int
    first_row: int
    num_rows: int
    end: int  # position after the last row's
    blocks: tuple[int, ...]  # positions in the block table
    window: int
    sinks: int


@dataclass(frozen=True)
class _Segment:
    """Spans of equally many rows that are computed together.

    rows: int64 `[num_spans * num_rows]`. blocks: int64 `[num_spans * num_blocks]`. unused: indices (span,
    block, offset) of gathered slots that no row sees. bias: float32 `[num_spans, num_rows,
    num_blocks * block_size]`, 0 where a row sees a token, else -inf. sinks: bool `[num_spans, 1,
    num_blocks * block_size]`, tokens that the sink query meets; None where there are none.
    """

    num_spans: int
    num_rows: int
    num_blocks: int
    rows: Tensor
    blocks: Tensor
    unused: tuple[Tensor, Tensor, Tensor]
    bias: Tensor
    sinks: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """How one step's rows attend in every layer of a group. Lives for one step: the pool must not grow."""

    segments: tuple[_Segment, ...]
    num_tokens: int
    gathered: Tensor  # scratch, the pool's dtype
    scales: Tensor | None  # the pool's
    unpacked: Tensor  # scratch, float32

    @staticmethod
    def build(  # noqa: PLR0917 (the order of the operator's schema)
        kv: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        window: int,
        scales: Tensor | None = None,
        windows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionPlan:
        """Plan for a group's pool `kv`; the arguments are those of the operator `paged_attention`."""
        expect_pool(_OPERATOR, kv, scales, 0)
        starts, lens = _checked(kv, block_tables, query_starts, context_lens, window)
        num_blocks, _, _, num_kv_heads, block_size, _ = kv.shape
        head_dim = head_size(kv)
        token_bytes = 2 * num_kv_heads * head_dim * 4
        seen = _seen(len(lens), window, windows, sinks)
        spans = _spans(starts, lens, block_size, seen)
        segments = tuple(
            _segment(group, block_tables, block_size, num_blocks)
            for group in _grouped(spans, _GATHER_BYTES // (token_bytes * block_size))
        )
        block_numel = 2 * num_kv_heads * block_size * head_dim
        numel = max((len(segment.blocks) for segment in segments), default=0) * block_numel
        return AttentionPlan(
            segments,
            starts[-1],
            torch.empty(numel if scales is None else 0, dtype=kv.dtype, device=kv.device),
            scales,
            torch.empty(numel, dtype=torch.float32, device=kv.device),
        )

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        scale: float,
        sink_query: Tensor | None = None,
        *,
        key_offset: Tensor | None = None,
    ) -> Tensor:
        """Attention of float32 `query` `[num_tokens, num_heads, head_dim]` in one layer of the group."""
        expect_pool(_OPERATOR, kv, self.scales, layer)
        expect_dtype(_OPERATOR, "query", query, torch.float32)
        num_kv_heads, head_dim = kv.shape[3], head_size(kv)
        expect_shape(_OPERATOR, "query", query, (self.num_tokens, "num_heads", head_dim))
        num_heads = query.shape[1]
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{_OPERATOR}: query has {num_heads} heads, expected a multiple of kv's {num_kv_heads}"
            )
        if sink_query is not None:
            expect_dtype(_OPERATOR, "sink_query", sink_query, torch.float32)
            expect_shape(_OPERATOR, "sink_query", sink_query, tuple(query.shape))
        elif any(segment.sinks is not None for segment in self.segments):
            raise ValueError(
                f"{_OPERATOR}: sink_query is missing, expected one (tokens after sinks are hidden)"
            )
        shift = torch.zeros((self.num_tokens, num_heads), dtype=torch.float32, device=query.device)
        if sink_query is not None and key_offset is not None:
            expect_shape(_OPERATOR, "key_offset", key_offset, (num_kv_heads, head_dim))
            by_head = key_offset.repeat_interleave(num_heads // num_kv_heads, dim=0)
            shift = ((sink_query - query) * by_head).sum(-1)
        if kv.dtype == torch.uint8:  # as the keys are
            query = rotate(query)
            sink_query = None if sink_query is None else rotate(sink_query)
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        pool = kv.select(1, layer)
        scales = None if self.scales is None else self.scales.select(1, layer)
        for segment in self.segments:
            keys, values = self._unpack(pool, scales, segment)
            grouped = _by_kv_head(query, segment, num_kv_heads)
            if segment.sinks is not None and sink_query is not None:
                others = _by_kv_head(sink_query, segment, num_kv_heads)
                shifts = _by_kv_head(shift.unsqueeze(-1), segment, num_kv_heads)
                result = _with_sinks(
                    grouped, others, shifts, keys, values, segment.bias, segment.sinks, scale
                )
            else:
                attend = _fused if segment.num_rows >= _MIN_FUSED_ROWS else _batched
                result = attend(grouped, keys, values, segment.bias, scale)
            rows = result.permute(0, 3, 1, 2, 4).reshape(len(segment.rows), num_heads, head_dim)
            out.index_copy_(0, segment.rows, rows)
        return out

    def _unpack(self, pool: Tensor, scales: Tensor | None, segment: _Segment) -> tuple[Tensor, Tensor]:
        """Keys and values as float32 `[num_spans, num_kv_heads, num_keys, head_dim]`, unused slots zeroed."""
        num_kv_heads = pool.shape[2]
        if scales is None:
            shape = (len(segment.blocks), *pool.shape[1:])
            gathered = self.gathered[: math.prod(shape)].view(shape)
            floats = torch.index_select(pool, 0, segment.blocks, out=gathered)
        else:
            codes = pool.view(torch.uint8).index_select(0, segment.blocks).view(pool.dtype)
            floats = dequantise(codes, scales.index_select(0, segment.blocks))
        by_head = floats.view(segment.num_spans, segment.num_blocks, *floats.shape[1:]).permute(
            2, 0, 3, 1, 4, 5
        )
        unpacked = self.unpacked[: floats.numel()].view(by_head.shape).copy_(by_head)
        # A hidden value still meets a weight of zero in the product, and 0 * NaN is NaN.
        spans, blocks, offsets = segment.unused
        if len(spans):
            unpacked[:, spans, :, blocks, offsets] = 0.0
        keys, values = unpacked.view(2, segment.num_spans, num_kv_heads, -1, floats.shape[-1])
        return keys, values


def _by_kv_head(query: Tensor, segment: _Segment, num_kv_heads: int) -> Tensor:
    """A segment's rows, `[num_spans, num_kv_heads, heads a KV head, num_rows, head_dim]`."""
    rows = query.index_select(0, segment.rows)
    grouped = rows.view(segment.num_spans, segment.num_rows, num_kv_heads, -1, query.shape[2])
    return grouped.permute(0, 2, 3, 1, 4)


def _with_sinks(  # noqa: PLR0917
    query: Tensor,
    sink_query: Tensor,
    shifts: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """Rows that meet some keys as one query and the sinks as another."""
    across = keys.unsqueeze(2).transpose(-1, -2)
    scores = torch.where(sinks[:, None, None], sink_query @ across + shifts, query @ across) * scale
    return (scores + bias[:, None, None]).softmax(-1) @ values.unsqueeze(2)


def _fused(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Many rows of one sequence, by torch's fused kernel with KV heads as its batch."""
    heads_a_kv_head = query.shape[2]
    expand = (-1, heads_a_kv_head, -1, -1)
    return F.scaled_dot_product_attention(
        query[0],
        keys[0].unsqueeze(1).expand(expand),
        values[0].unsqueeze(1).expand(expand),
        attn_mask=bias.unsqueeze(0),
        scale=scale,
    ).unsqueeze(0)


def _batched(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Few rows of each of many sequences, by one product over all query heads of a KV head."""
    num_spans, num_kv_heads, heads_a_kv_head, num_rows, head_dim = query.shape
    flat = (num_spans * num_kv_heads, heads_a_kv_head * num_rows)
    stacked = (query * scale).reshape(*flat, head_dim)
    scores = torch.bmm(stacked, keys.flatten(0, 1).transpose(1, 2))
    by_row = scores.view(num_spans, num_kv_heads * heads_a_kv_head, num_rows, -1)
    by_row.add_(bias.unsqueeze(1))
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(query.shape)


def _checked(
    kv: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, window: int
) -> tuple[list[int], list[int]]:
    """query_starts and context_lens as lists, once all of the batch fits together."""
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_starts", query_starts),
        ("context_lens", context_lens),
    ):
        expect_dtype(_OPERATOR, name, tensor, torch.int32)
    expect_shape(_OPERATOR, "context_lens", context_lens, ("num_seqs",))
    num_seqs = len(context_lens)
    expect_shape(_OPERATOR, "query_starts", query_starts, (num_seqs + 1,))
    expect_shape(_OPERATOR, "block_tables", block_tables, (num_seqs, "max_blocks"))
    if window < 0:
        raise ValueError(f"{_OPERATOR}: window is {window}, expected 0 (all) or more")
    starts: list[int] = query_starts.tolist()
    lens: list[int] = context_lens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{_OPERATOR}: query_starts begins with {starts[0]}, expected 0")
    capacity = block_tables.shape[1] * kv.shape[4]
    for sequence, length in enumerate(lens):
        num_rows = starts[sequence + 1] - starts[sequence]
        if not 0 <= num_rows <= length:
            raise ValueError(
                f"{_OPERATOR}: query_starts gives sequence {sequence} {num_rows} rows, "
                f"expected 0 to {length} (its context_lens)"
            )
        if num_rows and length > capacity:
            raise ValueError(
                f"{_OPERATOR}: context_lens[{sequence}] is {length}, expected at most {capacity} "
                f"(block_tables has {block_tables.shape[1]} blocks of {kv.shape[4]})"
            )
    return starts, lens


def _seen(num_seqs: int, window: int, windows: Tensor | None, sinks: Tensor | None) -> list[tuple[int, int]]:
    """The window and the sinks of each sequence."""
    columns = []
    for name, given, default in (("windows", windows, window), ("sinks", sinks, 0)):
        if given is None:
            columns.append([default] * num_seqs)
            continue
        expect_dtype(_OPERATOR, name, given, torch.int32)
        expect_shape(_OPERATOR, name, given, (num_seqs,))
        columns.append(given.tolist())
        for sequence, value in enumerate(columns[-1]):
            if value < 0:
                raise ValueError(f"{_OPERATOR}: {name}[{sequence}] is {value}, expected 0 or more")
    seen = list(zip(*columns, strict=True))
    for sequence, (own, first) in enumerate(seen):
        if first and not own:
            raise ValueError(
                f"{_OPERATOR}: sinks[{sequence}] is {first}, expected 0 where there is no window"
            )
    return seen


def _spans(
    starts: list[int], lens: list[int], block_size: int, seen: list[tuple[int, int]]
) -> Iterator[_Span]:
    """Each sequence's rows in pieces of at most `_MAX_ROWS`."""
    for sequence, length in enumerate(lens):
        first_position = length - (starts[sequence + 1] - starts[sequence])
        window, sinks = seen[sequence]
        for begin in range(first_position, length, _MAX_ROWS):
            end = min(begin + _MAX_ROWS, length)
            hides = end > sinks + window
            oldest = max(0, begin - window + 1) if window and hides else 0
            held = range(oldest // block_size, -(-end // block_size))
            before = range(min(-(-sinks // block_size), held.start)) if hides else range(0)
            yield _Span(
                sequence,
                starts[sequence] + begin - first_position,
                end - begin,
                end,
                (*before, *held),
                window if hides else 0,
                sinks if hides else 0,
            )


def _grouped(spans: Iterable[_Span], max_blocks: int) -> Iterator[list[_Span]]:
    """Spans to compute together: equally many rows, similar contexts, at most `max_blocks` blocks in all."""
    group: list[_Span] = []
    for span in sorted(spans, key=lambda span: (span.num_rows, -len(span.blocks), span.sequence)):
        if group and (
            span.num_rows != group[0].num_rows
            or span.num_rows >= _MIN_FUSED_ROWS
            or (len(group) + 1) * len(group[0].blocks) > max_blocks
            or len(span.blocks) < len(group[0].blocks) * (1 - _MAX_PADDING)
        ):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _segment(spans: list[_Span], block_tables: Tensor, block_size: int, pool_blocks: int) -> _Segment:
    """Index tensors of spans computed together, padded to the longest (which comes first)."""
    device = block_tables.device
    num_rows, num_blocks = spans[0].num_rows, len(spans[0].blocks)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    sequences = column([span.sequence for span in spans])
    ends = column([span.end for span in spans])
    windows, sinks = column([span.window for span in spans]), column([span.sinks for span in spans])
    # Padding repeats the span's own first block, hidden, so that no stranger's block is read.
    logical = torch.tensor(
        [[*span.blocks, *span.blocks[:1] * (num_blocks - len(span.blocks))] for span in spans], device=device
    )
    padding = torch.arange(num_blocks, device=device) >= column([len(span.blocks) for span in spans])
    blocks = block_tables[sequences, logical].long()
    low, high = torch.aminmax(blocks)
    if low < 0 or high >= pool_blocks:
        raise ValueError(
            f"{_OPERATOR}: block_tables gives visible blocks {int(low)} to {int(high)}, "
            f"expected 0 to {pool_blocks - 1}"
        )
    offsets = torch.arange(block_size, device=device)
    held = logical.unsqueeze(2) * block_size + offsets  # [spans, blocks, block_size]
    # A key of padding stands after all rows.
    keys = held.masked_fill(padding.unsqueeze(2), torch.iinfo(held.dtype).max).view(len(spans), 1, -1)
    rows = torch.arange(num_rows, device=device)
    positions = ends - num_rows + rows
    bounded, kept = windows.unsqueeze(2) > 0, sinks.unsqueeze(2)
    hidden = keys > positions.unsqueeze(2)
    hidden |= bounded & (keys <= positions.unsqueeze(2) - windows.unsqueeze(2)) & (keys >= kept)
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=device).masked_fill_(hidden, -torch.inf)
    oldest = torch.where(windows > 0, ends - num_rows - windows + 1, 0).unsqueeze(2)
    unused = (held >= ends.unsqueeze(2)) | ((held < oldest) & (held >= kept))
    span, block, offset = unused.nonzero(as_tuple=True)
    first_rows = column([span.first_row for span in spans])
    return _Segment(
        num_spans=len(spans),
        num_rows=num_rows,
        num_blocks=num_blocks,
        rows=(first_rows + rows).flatten(),
        blocks=blocks.flatten(),
        unused=(span, block, offset),
        bias=bias,
        sinks=keys < kept if any(span.sinks for span in spans) else None,
    )
