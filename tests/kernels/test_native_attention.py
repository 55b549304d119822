"""The native paged attention: right against float64, and the same bits however the work is cut."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.kernels import written_order
from tests.kernels.native import (
    as_met,
    everywhere,
    instruction_set,
    needs_native,
    same_bits,
    supported,
    threads,
    tolerance,
)

pytestmark = needs_native
attend = torch.ops.kvstrata.paged_attention
BORDERS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 260)


class Pool:
    """Sequences of random K and V in shuffled blocks of a strided pool whose unused slots hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.lengths, self.layer = lengths, 1
        needed = [-(-length // block_size) for length in lengths]
        numel = 3 * 2 * kv_heads * block_size * head_dim
        memory = torch.full((sum(needed) + 2, numel + 96), torch.nan, dtype=dtype)
        self.kv = memory[:, :numel].view(-1, 3, 2, kv_heads, block_size, head_dim)
        order = torch.randperm(len(memory)).int()
        self.tables = torch.full((len(lengths), max(needed, default=0) + 1), -1, dtype=torch.int32)
        self.contents = []
        used = 0
        for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
            self.tables[row, :blocks] = order[used : used + blocks]
            used += blocks
            content = torch.randn(length, 2, kv_heads, head_dim).to(dtype)
            positions = torch.arange(length)
            block = self.tables[row, positions // block_size].long()
            self.kv[block, self.layer, :, :, positions % block_size] = content
            self.contents.append(content)
        self.scale = head_dim**-0.5

    def queries(self, heads_per_kv: int, counts: list[int]) -> list[Tensor]:
        kv_heads, _, head_dim = self.kv.shape[3:]
        return [torch.randn(count, kv_heads * heads_per_kv, head_dim) for count in counts]

    def run(self, rows: list[int], queries: list[Tensor], lengths: list[int], window: int = 0) -> Tensor:
        starts = torch.tensor([0, *(len(query) for query in queries)]).cumsum(0).int()
        lens = torch.tensor(lengths, dtype=torch.int32)
        tables = self.tables[rows].clone()
        for row, (query, length) in enumerate(zip(queries, lengths, strict=True)):
            hidden = max(0, length - len(query) - window + 1) if window else 0
            tables[row, : hidden // self.kv.shape[4]] = -1  # slipped out of the window
        return attend(torch.cat(queries), self.kv, self.layer, tables, starts, lens, self.scale, window)

    def expected(self, row: int, query: Tensor, length: int, window: int) -> Tensor:
        query = as_met(query, self.kv.dtype)
        content = self.contents[row][:length].double()
        repeats = query.shape[1] // content.shape[2]
        keys, values = content.repeat_interleave(repeats, dim=2).unbind(1)
        positions = torch.arange(length - len(query), length).unsqueeze(1)
        seen = torch.arange(length) <= positions
        if window:
            seen &= torch.arange(length) > positions - window
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * self.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from(BORDERS), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    heads_per_kv=st.integers(1, 5),
    head_dim=st.sampled_from([8, 16, 40, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 3, 16, 64, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    window=st.sampled_from([0, 0, 1, 5, 64, 100]),
    choice=st.randoms(use_true_random=False),
)
def test_any_mixed_batch_is_right_on_every_instruction_set(  # noqa: PLR0917
    lengths: list[int],
    kv_heads: int,
    heads_per_kv: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int,
    choice: random.Random,
) -> None:
    pool = Pool(lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    counts = [choice.choice([0, 1, min(length, 7), min(length, 17), length]) for length in lengths]
    queries = pool.queries(heads_per_kv, counts)
    rows = list(range(len(lengths)))
    out = everywhere(lambda: pool.run(rows, queries, lengths, window))
    expected = [pool.expected(row, queries[row], lengths[row], window) for row in rows]
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-5, atol=tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "window"), [(64, 0), (80, 70), (24, 0), (128, 3)])
def test_bits_are_those_of_the_written_order(dtype: torch.dtype, head_dim: int, window: int) -> None:
    length, heads_per_kv = 150, 3
    pool = Pool([length], head_dim=head_dim, dtype=dtype)
    queries = pool.queries(heads_per_kv, [length])
    out = everywhere(lambda: pool.run([0], queries, [length], window))
    for position in (0, 1, 15, 16, 63, 64, 100, 127, 128, 149):
        first = max(0, position - window + 1) if window else 0
        for kv_head in range(pool.kv.shape[3]):
            keys, values = pool.contents[0][: position + 1, :, kv_head].unbind(1)
            heads = slice(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv)
            query = queries[0][position, heads]
            specified = written_order.attention(query, keys, values, pool.scale, first)
            assert same_bits(out[position, heads], specified), (position, kv_head)


@pytest.mark.parametrize("window", [0, 40, 64])
@pytest.mark.parametrize("heads_per_kv", [1, 3, 5])
def test_a_row_has_the_same_bits_however_its_prompt_is_chunked(window: int, heads_per_kv: int) -> None:
    length = 277
    pool = Pool([length])
    query = pool.queries(heads_per_kv, [length])[0]
    whole = pool.run([0], [query], [length], window)
    for chunk in (1, 16, 17, 100):
        parts = [
            pool.run([0], [query[start : start + chunk]], [min(start + chunk, length)], window)
            for start in range(0, length, chunk)
        ]
        assert same_bits(torch.cat(parts), whole), chunk


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    lengths = [300, 1, 64, 65, 129, 16, 250]
    counts = [1, 1, 64, 2, 40, 16, 1]
    pool = Pool(lengths)
    queries = pool.queries(3, counts)
    alone = [pool.run([row], [queries[row]], [lengths[row]]) for row in range(len(lengths))]
    for rows in ([0, 1], [6, 5, 4, 3, 2, 1, 0], [2, 0], list(range(7)) * 5):
        together = pool.run(rows, [queries[row] for row in rows], [lengths[row] for row in rows])
        assert same_bits(together, torch.cat([alone[row] for row in rows])), rows


@pytest.mark.parametrize("count", [1, 4, 20])
@pytest.mark.parametrize("window", [0, 1500])
def test_a_long_context_spread_over_threads_keeps_its_bits(count: int, window: int) -> None:
    length = 3000
    pool = Pool([length], head_dim=128)
    queries = pool.queries(4, [count])
    results = []
    for number in (1, 2, 3, 5):
        with threads(number):
            results.append(pool.run([0], queries, [length], window))
    assert all(same_bits(result, results[0]) for result in results)
    expected = pool.expected(0, queries[0], length, window)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=tolerance(pool.kv.dtype))


def test_block_size_does_not_change_bits() -> None:
    results = []
    for block_size in (1, 16, 48, 256):
        pool = Pool([200], block_size=block_size)
        torch.manual_seed(1)
        content = torch.randn(200, 2, 2, 64).to(torch.bfloat16)
        positions = torch.arange(200)
        block = pool.tables[0, positions // block_size].long()
        pool.kv[block, pool.layer, :, :, positions % block_size] = content
        results.append(pool.run([0], [torch.randn(30, 6, 64)], [200]))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("first", [50, 51])  # two neighbours share a product of bf16
def test_nan_in_a_later_token_never_reaches_an_earlier_row(first: int) -> None:
    pool = Pool([100])
    queries = pool.queries(3, [100])
    clean = everywhere(lambda: pool.run([0], queries, [100]))
    positions = torch.arange(first, 100)
    block = pool.tables[0, positions // 16].long()
    pool.kv[block, pool.layer, :, :, positions % 16] = torch.nan
    for name in supported():
        with instruction_set(name):
            poisoned = pool.run([0], queries, [100])
            few = [pool.run([0], [queries[0][start : start + 2]], [start + 2]) for start in range(0, 100, 2)]
        assert same_bits(poisoned[:first], clean[:first]), name
        assert poisoned[first:].isnan().all(), name
        assert same_bits(torch.cat(few)[:first], clean[:first]), name


@pytest.mark.parametrize("hidden", [50, 51])
def test_nan_before_the_window_never_reaches_a_row(hidden: int) -> None:
    pool = Pool([100])
    queries = pool.queries(3, [100])
    clean = pool.run([0], queries, [100], window=20)
    positions = torch.arange(hidden)
    block = pool.tables[0, positions // 16].long()
    pool.kv[block, pool.layer, :, :, positions % 16] = torch.nan
    poisoned = everywhere(lambda: pool.run([0], queries, [100], window=20)[hidden + 19 :])
    assert same_bits(poisoned, clean[hidden + 19 :])


def test_denormal_and_infinite_elements_of_a_bf16_pool_give_the_same_bits_everywhere() -> None:
    length, heads_per_kv = 150, 3
    pool = Pool([length])
    content = pool.contents[0]
    content[::3] *= 2.0**-125  # products with weights and queries below the least normal number
    content[1::3] *= 2.0**-131
    content[149, 1, 1, 5] = torch.inf
    block = pool.tables[0, torch.arange(length) // 16].long()
    pool.kv[block, pool.layer, :, :, torch.arange(length) % 16] = content
    queries = pool.queries(heads_per_kv, [length])
    queries[0][::2] *= 2.0**-60
    out = everywhere(lambda: pool.run([0], queries, [length]))
    for position in (0, 1, 2, 3, 63, 64, 100, 148, 149):
        for kv_head in range(2):
            keys, values = content[: position + 1, :, kv_head].unbind(1)
            heads = slice(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv)
            specified = written_order.attention(queries[0][position, heads], keys, values, pool.scale, 0)
            assert same_bits(out[position, heads], specified), (position, kv_head)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    pool = Pool([70], dtype=torch.float32)
    query = pool.queries(3, [5])[0] * 300.0
    out = everywhere(lambda: pool.run([0], [query], [70]))
    expected = pool.expected(0, query, 70, 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


def test_strided_queries_are_read_in_place() -> None:
    pool = Pool([90])
    fused = torch.randn(90, 10, 64)
    dense = fused[:, :6].contiguous()
    assert same_bits(
        pool.run([0], [dense], [90]),
        attend(
            fused[:, :6],
            pool.kv,
            1,
            pool.tables,
            torch.tensor([0, 90]).int(),
            torch.tensor([90]).int(),
            pool.scale,
        ),
    )


def test_a_batch_without_tokens_gives_none() -> None:
    pool = Pool([20])
    none = torch.empty(0, 6, 64)
    assert pool.run([0], [none], [20]).shape == (0, 6, 64)
    starts, lens = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    assert attend(none, pool.kv, 0, pool.tables[:0], starts, lens, 1.0).shape == (0, 6, 64)
