"""Attention under windows and sinks of each sequence's own: right, and the same bits everywhere."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.cache.formats import FORMATS
from kvstrata.kernels import kv_formats, written_order
from kvstrata.kernels.reference import paged_attention as reference
from tests.kernels.native import as_met, everywhere, needs_native, same_bits, tolerance
from tests.kernels.quantised_pool import LAYER, Case
from tests.kernels.test_native_attention import BORDERS, Pool

attend = torch.ops.kvstrata.paged_attention
Seen = tuple[int, int]  # window (0: all), sinks


class Batch:
    """Rows at the end of some of a pool's sequences, each with a window and sinks of its own.

    Blocks that no row sees are -1 in the tables, so that nobody may read them.
    """

    def __init__(
        self, pool: Pool, seen: list[Seen], counts: list[int], heads_per_kv: int, *, length: int | None = None
    ) -> None:
        self.pool, self.seen, self.counts = pool, seen, counts
        self.lengths = [length or each for each in pool.lengths]
        self.queries = pool.queries(heads_per_kv, counts)
        self.sink_queries = pool.queries(heads_per_kv, counts)
        for row, (window, sinks) in enumerate(seen):
            positions = torch.arange(self.lengths[row] - counts[row], self.lengths[row])
            same = positions < window + sinks if window else positions >= 0
            self.sink_queries[row][same] = self.queries[row][same]  # nothing hidden yet: rotated alike
        self.tables = pool.tables.clone()
        size = pool.kv.shape[4]
        for row, ((window, sinks), length_, count) in enumerate(zip(seen, self.lengths, counts, strict=True)):
            oldest = max(0, length_ - count - window + 1) if window else 0
            self.tables[row, -(-sinks // size) : max(oldest // size, -(-sinks // size))] = -1

    def run(self, operator=attend) -> Tensor:
        starts = torch.tensor([0, *self.counts]).cumsum(0).int()
        windows, sinks = torch.tensor(self.seen, dtype=torch.int32).unbind(1)
        return operator(
            torch.cat(self.queries),
            self.pool.kv,
            self.pool.layer,
            self.tables,
            starts,
            torch.tensor(self.lengths, dtype=torch.int32),
            self.pool.scale,
            0,
            None,
            windows.contiguous(),
            sinks.contiguous(),
            torch.cat(self.sink_queries),
        )

    def expected(self) -> Tensor:
        return torch.cat(
            [
                exact(
                    as_met(self.queries[row], self.pool.kv.dtype),
                    as_met(self.sink_queries[row], self.pool.kv.dtype),
                    *self.pool.contents[row][: self.lengths[row]].unbind(1),
                    self.seen[row],
                    self.pool.scale,
                )
                for row in range(len(self.counts))
            ]
        )


def exact(  # noqa: PLR0917
    query: Tensor, sink_query: Tensor, keys: Tensor, values: Tensor, seen: Seen, scale: float
) -> Tensor:
    """The last `len(query)` rows of a sequence in float64."""
    window, sinks = seen
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, dim=1) for x in (keys, values))
    key = torch.arange(len(keys))
    positions = torch.arange(len(keys) - len(query), len(keys)).unsqueeze(1)
    visible = key <= positions
    if window:
        visible &= (key > positions - window) | (key < sinks)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys)
    others = torch.einsum("qhd,khd->hqk", sink_query.double(), keys)
    scores = torch.where(key < sinks, others, scores) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def some_batch(choice: random.Random, lengths: list[int], heads_per_kv: int, **pool: object) -> Batch:
    counts = [choice.choice([0, 1, min(length, 7), min(length, 17), length]) for length in lengths]
    seen = [
        choice.choice([(0, 0), (1, 0), (50, 0), (1, 1), (16, 4), (5, 70), (40, 64), (100, 3)])
        for _ in lengths
    ]
    return Batch(Pool(lengths, **pool), seen, counts, heads_per_kv)


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from(BORDERS), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    heads_per_kv=st.integers(1, 5),
    head_dim=st.sampled_from([8, 64, 80]),
    block_size=st.sampled_from([1, 3, 16, 64, 300]),
    choice=st.randoms(use_true_random=False),
)
def test_any_mix_of_retentions_is_right_on_every_instruction_set(  # noqa: PLR0917
    lengths: list[int],
    kv_heads: int,
    heads_per_kv: int,
    head_dim: int,
    block_size: int,
    choice: random.Random,
) -> None:
    batch = some_batch(
        choice, lengths, heads_per_kv, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    out = everywhere(batch.run)
    torch.testing.assert_close(out.double(), batch.expected(), rtol=1e-5, atol=tolerance(batch.pool.kv.dtype))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from(BORDERS), min_size=1, max_size=4),
    heads_per_kv=st.integers(1, 3),
    block_size=st.sampled_from([1, 16, 64]),
    choice=st.randoms(use_true_random=False),
)
def test_the_reference_is_right_for_any_mix_of_retentions(
    lengths: list[int], heads_per_kv: int, block_size: int, choice: random.Random
) -> None:
    batch = some_batch(choice, lengths, heads_per_kv, block_size=block_size, dtype=torch.float32)
    torch.testing.assert_close(batch.run(reference).double(), batch.expected(), rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize(
    ("sinks", "window"), [(4, 16), (4, 60), (5, 16), (3, 61), (70, 20), (71, 21), (130, 1)]
)
def test_bits_are_those_of_the_written_order(sinks: int, window: int) -> None:
    length, heads_per_kv = 200, 3
    pool = Pool([length])
    batch = Batch(pool, [(window, sinks)], [length], heads_per_kv)
    out = everywhere(batch.run)
    for position in (0, sinks - 1, sinks, sinks + window - 1, sinks + window, 64, 100, 151, 199):
        first = max(0, position - window + 1)
        for kv_head in range(pool.kv.shape[3]):
            keys, values = pool.contents[0][: position + 1, :, kv_head].unbind(1)
            heads = slice(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv)
            specified = written_order.attention(
                batch.queries[0][position, heads],
                keys,
                values,
                pool.scale,
                first,
                sinks=sinks,
                sink_query=batch.sink_queries[0][position, heads],
            )
            assert same_bits(out[position, heads], specified), (position, kv_head)


@needs_native
@pytest.mark.parametrize(("sinks", "window"), [(4, 60), (70, 20), (0, 33)])
@pytest.mark.parametrize("heads_per_kv", [1, 3, 5])
def test_a_row_has_the_same_bits_however_its_prompt_is_chunked(
    sinks: int, window: int, heads_per_kv: int
) -> None:
    length = 277
    pool = Pool([length])
    whole = Batch(pool, [(window, sinks)], [length], heads_per_kv)
    out = whole.run()
    for chunk in (1, 5, 17, 100):
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            part = Batch(pool, [(window, sinks)], [end - start], heads_per_kv, length=end)
            part.queries = [whole.queries[0][start:end]]
            part.sink_queries = [whole.sink_queries[0][start:end]]
            assert same_bits(part.run(), out[start:end]), (chunk, start)


@needs_native
@pytest.mark.parametrize(("sinks", "window"), [(4, 60), (64, 64), (0, 100)])
def test_rows_that_hide_nothing_have_the_bits_of_full_attention(sinks: int, window: int) -> None:
    length = 260
    pool = Pool([length])
    batch = Batch(pool, [(window, sinks)], [length], 3)
    full = Batch(pool, [(0, 0)], [length], 3)
    full.queries = batch.queries
    equal = [same_bits(a, b) for a, b in zip(batch.run(), full.run(), strict=True)]
    assert equal.index(False) == sinks + window
    assert not any(equal[sinks + window :])


@needs_native
@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("count", [1, 5, 150])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_format_meets_its_sinks_by_the_second_query(fmt: str, count: int, head_dim: int) -> None:
    torch.manual_seed(0)
    case = Case(fmt, 150, head_dim=head_dim)
    case.write()
    seen = (40, 20)
    query, sink_query = torch.randn(2, count, 6, head_dim)
    unhidden = torch.arange(150 - count, 150) < sum(seen)
    sink_query[unhidden] = query[unhidden]
    batch = (case.table, torch.tensor([0, count]).int(), torch.tensor([150]).int(), case.scale, 0)
    window, sinks = (torch.tensor([each]).int() for each in seen)
    run = lambda: attend(  # noqa: E731
        query, case.pool.kv, LAYER, *batch, case.pool.scales, window, sinks, sink_query
    )
    out = everywhere(run)
    if case.pool.scales is None:
        keys, values = case.key.to(case.pool.kv.dtype), case.value.to(case.pool.kv.dtype)
    else:
        keys, values = case.read()
    if fmt == "int4":
        query, sink_query = kv_formats.rotate(query), kv_formats.rotate(sink_query)
    dtype = case.pool.kv.dtype
    expected = exact(as_met(query, dtype), as_met(sink_query, dtype), keys, values, seen, case.scale)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2 * tolerance(dtype))


@needs_native
@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_an_offset_of_the_keys_is_made_good_where_sinks_are_met(count: int, head_dim: int) -> None:
    torch.manual_seed(0)
    case = Case("fp32", 150, head_dim=head_dim)
    offset, keys = torch.randn(2, head_dim) * 3, case.key
    case.key = keys - offset
    case.write()
    seen = (40, 20)
    query, sink_query = torch.randn(2, count, 6, head_dim)
    unhidden = torch.arange(150 - count, 150) < sum(seen)
    sink_query[unhidden] = query[unhidden]
    batch = (case.table, torch.tensor([0, count]).int(), torch.tensor([150]).int(), case.scale, 0)
    window, sinks = (torch.tensor([each]).int() for each in seen)
    arguments = (query, case.pool.kv, LAYER, *batch, None, window, sinks, sink_query, offset)
    expected = exact(query, sink_query, keys, case.value, seen, case.scale)
    for out in (everywhere(lambda: attend(*arguments)), reference(*arguments)):
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=5e-5)


@needs_native
def test_hidden_tokens_reach_no_row_whatever_they_hold() -> None:
    pool = Pool([200])
    batch = Batch(pool, [(16, 4)], [40], 3)
    before = batch.run()
    block = pool.tables[0, torch.arange(4, 144) // 16].long()
    pool.kv[block, pool.layer, :, :, torch.arange(4, 144) % 16] = torch.nan
    assert same_bits(batch.run(), before)


@pytest.mark.parametrize("operator", [pytest.param(attend, marks=needs_native), reference])
@pytest.mark.parametrize(
    ("windows", "sinks", "query", "message"),
    [
        ([5], [-1], True, r"sinks\[0\] is -1"),
        ([-5], [0], True, r"windows\[0\] is -5"),
        ([0], [3], True, r"sinks\[0\] is 3, expected 0 where there is no window"),
        ([5], [3], False, "sink_query is missing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    operator, windows: list[int], sinks: list[int], query: bool, message: str
) -> None:
    pool = Pool([40])
    queries = pool.queries(3, [2])[0]
    batch = (pool.tables, torch.tensor([0, 2]).int(), torch.tensor([40]).int(), pool.scale, 0, None)
    with pytest.raises(ValueError, match=message):
        operator(
            queries,
            pool.kv,
            pool.layer,
            *batch,
            torch.tensor(windows).int(),
            torch.tensor(sinks).int(),
            queries if query else None,
        )


@needs_native
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize(("window", "sinks"), [(900, 4), (700, 130), (600, 0)])
def test_a_long_window_spread_over_threads_keeps_its_bits(count: int, window: int, sinks: int) -> None:
    batch = Batch(Pool([1500]), [(window, sinks)], [count], 3)
    out = everywhere(batch.run)
    torch.testing.assert_close(out.double(), batch.expected(), rtol=1e-5, atol=tolerance(batch.pool.kv.dtype))
