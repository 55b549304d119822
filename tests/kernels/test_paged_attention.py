"""The operator against the definition of causal attention, written as plainly as it can be."""

import math
import re

import pytest
import torch
from torch import Tensor

from kvstrata import kernels

attend = torch.ops.kvstrata.paged_attention


class Case:
    """Sequences of `context_lens` tokens, the last `query_lens` of them asking, over a shuffled NaN pool."""

    def __init__(
        self,
        context_lens: list[int],
        query_lens: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 8,
        block_size: int = 4,
        window: int = 0,
        dtype: torch.dtype = torch.float32,
        stray: int = -1,
    ) -> None:
        torch.manual_seed(sum(context_lens) + 31 * len(context_lens))
        num_heads, num_kv_heads = heads
        self.layer, self.window, self.scale = 1, window, head_dim**-0.5
        needed = [math.ceil(length / block_size) for length in context_lens]
        num_blocks = sum(needed) + 2
        order = iter(torch.randperm(num_blocks).tolist())
        self.kv = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
        self.tables = torch.full((len(context_lens), max(needed, default=0) + 1), stray, dtype=torch.int32)
        self.keys_values = []
        for row, (length, asking) in enumerate(zip(context_lens, query_lens, strict=True)):
            content = torch.randn(2, length, num_kv_heads, head_dim).to(dtype)
            self.keys_values.append(content.float())
            visible = max(0, length - asking - window + 1) if window else 0
            for block in range(visible // block_size, needed[row]):
                self.tables[row, block] = next(order)
                for position in range(block * block_size, min(length, (block + 1) * block_size)):
                    slot = self.kv[self.tables[row, block], self.layer, :, :, position % block_size]
                    slot.copy_(content[:, position])
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.lens = torch.tensor(context_lens, dtype=torch.int32)
        self.query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype).float()

    def run(self) -> Tensor:
        return attend(
            self.query, self.kv, self.layer, self.tables, self.starts, self.lens, self.scale, self.window
        )

    def expected(self) -> Tensor:
        out = torch.empty_like(self.query, dtype=torch.float64)
        for row, (keys, values) in enumerate(self.keys_values):
            begin, end = self.starts[row : row + 2].tolist()
            for index in range(begin, end):
                position = len(keys) - (end - index)
                oldest = max(0, position - self.window + 1) if self.window else 0
                for head in range(self.query.shape[1]):
                    kv_head = head * keys.shape[1] // self.query.shape[1]
                    seen = slice(oldest, position + 1)
                    scores = keys[seen, kv_head].double() @ self.query[index, head].double() * self.scale
                    out[index, head] = scores.softmax(0) @ values[seen, kv_head].double()
        return out


def assert_exact(case: Case) -> None:
    # Weights of bf16 values are rounded to bf16.
    atol = 0.02 if case.kv.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_matches_definition_for_mixed_prefill_and_decode(
    heads: tuple[int, int], block_size: int, window: int
) -> None:
    contexts, queries = [1, 9, 30, 33, 33, 20, 7], [1, 1, 1, 3, 33, 20, 0]
    assert_exact(Case(contexts, queries, heads=heads, block_size=block_size, window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools_match_definition(dtype: torch.dtype) -> None:
    assert_exact(Case([17, 40, 5], [1, 20, 2], dtype=dtype))


@pytest.mark.parametrize("window", [0, 300])
def test_rows_taken_in_several_pieces_match_definition(window: int) -> None:
    assert_exact(Case([700], [600], heads=(2, 1), block_size=16, window=window))


def test_many_decodes_of_unlike_lengths_match_definition() -> None:
    contexts = [1 + 37 * i % 211 for i in range(24)]
    assert_exact(Case(contexts, [1] * 24, block_size=16))


def test_table_entries_that_no_query_sees_are_never_read() -> None:
    case = Case([40], [2], window=6, stray=10**6)
    assert (case.tables == 10**6).sum() > 2
    assert_exact(case)


def test_no_sequences_give_no_rows() -> None:
    assert Case([], []).run().shape == (0, 4, 8)


def test_sequences_without_queries_give_no_rows() -> None:
    assert Case([5, 0], [0, 0]).run().shape == (0, 4, 8)


def test_a_strided_pool_with_padding_between_blocks_is_read_in_place() -> None:
    case = Case([30, 9], [30, 1])
    num_blocks, *block = case.kv.shape
    padded = torch.full((num_blocks, math.prod(block) + 13), torch.nan)
    strided = padded[:, : math.prod(block)].unflatten(1, block)
    strided.copy_(case.kv)
    case.kv = strided
    assert_exact(case)


def test_prepared_attention_serves_every_layer_of_the_group() -> None:
    case = Case([30, 9], [30, 1])
    other = torch.roll(case.kv, shifts=1, dims=1)
    prepared = kernels.prepare_attention(case.kv, case.tables, case.starts, case.lens, case.window)
    first = prepared.attend(case.query, case.kv, case.layer, case.scale)
    second = prepared.attend(case.query, other, case.layer + 1, case.scale)
    assert torch.equal(first, second)
    assert torch.equal(first, case.run())


def broken(**changes: object) -> Case:
    case = Case([9, 5], [3, 1])
    for name, value in changes.items():
        setattr(case, name, value)
    return case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(5, 4, 8)}, "query has shape [5, 4, 8], expected [4, num_heads, 8]"),
        ({"query": torch.zeros(4, 3, 8)}, "query has 3 heads, expected a multiple of kv's 2"),
        ({"query": torch.zeros(4, 4, 8).half()}, "query has dtype torch.float16, expected torch.float32"),
        ({"kv": torch.zeros(4, 4)}, "kv has shape [4, 4], expected [num_blocks, group_layers, 2,"),
        ({"kv": torch.zeros(9, 3, 2, 2, 4, 8).int()}, "kv has dtype torch.int32, expected a floating point"),
        ({"layer": 3}, "layer is 3, expected 0 to 2"),
        ({"tables": torch.zeros(2, 4).long()}, "block_tables has dtype torch.int64, expected torch.int32"),
        ({"tables": torch.zeros(3, 4).int()}, "block_tables has shape [3, 4], expected [2, max_blocks]"),
        ({"tables": torch.zeros(2, 2).int()}, "context_lens[0] is 9, expected at most 8"),
        ({"tables": torch.full((2, 4), -1).int()}, "block_tables"),
        ({"starts": torch.tensor([0, 4]).int()}, "query_starts has shape [2], expected [3]"),
        ({"starts": torch.tensor([1, 3, 4]).int()}, "query_starts begins with 1, expected 0"),
        ({"starts": torch.tensor([0, 10, 11]).int()}, "gives sequence 0 10 rows, expected 0 to 9"),
        ({"starts": torch.tensor([0, 4, 3]).int()}, "gives sequence 1 -1 rows, expected 0 to 5"),
        ({"window": -1}, "window is -1, expected 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        broken(**changes).run()
