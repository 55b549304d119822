"""The native kernels between products, and of sampling: the written bits on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstrata.kernels import reference, reference_fused, written_order
from tests.kernels.native import everywhere, needs_native, same_bits

pytestmark = needs_native
ops = torch.ops.kvstrata
SIZES = (1, 7, 16, 17, 64, 576, 1000)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_rms_norm_has_the_written_bits(rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size) * 3, torch.randn(size)
    out = everywhere(lambda: ops.rms_norm(x, weight, 1e-5))
    assert same_bits(out, written_order.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_takes_heads_of_a_strided_tensor() -> None:
    x, weight = torch.randn(5, 9, 64)[:, 2:5], torch.randn(64)
    assert same_bits(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_is_an_addition_and_a_norm(size: int) -> None:
    residual, x, weight = torch.randn(6, size), torch.randn(6, 2 * size)[:, :size], torch.randn(size)

    def run() -> Tensor:
        total = residual.clone()
        out = ops.add_rms_norm(total, x, weight, 1e-5)
        return torch.stack((total, out))

    total, out = everywhere(run)
    assert same_bits(total, residual + x)
    assert same_bits(out, ops.rms_norm(residual + x, weight, 1e-5))


@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_gated_activation_has_the_written_bits_fused_or_not(kind: str, size: int) -> None:
    gate_up = torch.cat((torch.randn(5, size) * 10, torch.randn(5, size)), dim=1)
    gate, up = gate_up.chunk(2, dim=1)
    out = everywhere(lambda: ops.fused_gated_activation(gate_up, kind))
    assert same_bits(out, written_order.gated_activation(gate, up, kind))
    assert same_bits(out, ops.gated_activation(gate, up, kind))
    torch.testing.assert_close(out, reference.gated_activation(gate, up, kind), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
def test_gated_activation_of_extremes_stays_finite(kind: str) -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e4]])
    out = everywhere(lambda: ops.gated_activation(gate, torch.ones_like(gate), kind))
    torch.testing.assert_close(out[:, 1:], gate[:, 1:].clamp(min=0.0), rtol=1e-6, atol=1e-30)


def test_nan_is_passed_on() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0]])
    assert ops.rms_norm(x, torch.ones(3), 1e-5).isnan().all()
    assert ops.gated_activation(x, torch.ones(1, 3), "silu").isnan().tolist() == [[False, True, False]]
    assert ops.logsumexp(x).isnan().all()


@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 96, 128, 256])
def test_rope_has_the_written_bits(head_dim: int) -> None:
    x, angles = torch.randn(7, 8, head_dim)[:, 1:4], torch.randn(7, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    out = everywhere(lambda: ops.rope(x, cos, sin))
    assert same_bits(out, written_order.rope(x, cos, sin))
    torch.testing.assert_close(out, reference.rope(x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_kv_is_its_steps_one_by_one(dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    tokens, heads, kv_heads, block_size = 37, 6, 2, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 3)[:, :-3]
    weights = (torch.randn(head_dim), torch.randn(head_dim)) if normed else (None, None)
    angles = torch.randn(100, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 100, (tokens,))
    slots = torch.randperm(12 * block_size)[:tokens]
    memory = torch.full((12, 3 * 2 * kv_heads * block_size * head_dim + 5), 3.0, dtype=dtype)
    pool = memory[:, :-5].view(12, 3, 2, kv_heads, block_size, head_dim)

    def run(function: object, positions: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        pool.fill_(3.0)
        query = function(qkv, *weights, 1e-6, cos, sin, positions, slots, pool, 1)  # type: ignore[operator]
        return query, pool.clone()

    query = everywhere(lambda: run(ops.rope_write_kv, positions, cos, sin)[0])
    written = everywhere(lambda: run(ops.rope_write_kv, positions, cos, sin)[1]).float()
    by_row = run(ops.rope_write_kv, None, cos[positions], sin[positions])
    assert same_bits(by_row[0], query)
    assert same_bits(by_row[1].float(), written)

    q, k, v = qkv.reshape(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if normed:
        q, k = ops.rms_norm(q, weights[0], 1e-6), ops.rms_norm(k, weights[1], 1e-6)
    pool.fill_(3.0)
    ops.write_kv(pool, 1, ops.rope(k, cos[positions], sin[positions]), v, slots)
    assert same_bits(ops.rope(q, cos[positions], sin[positions]), query)
    assert same_bits(pool.float(), written)

    expected = run(reference_fused.rope_write_kv, positions, cos, sin)
    torch.testing.assert_close(query, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(written, expected[1].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_pool_is_written_to_nearest_even_as_torch_rounds(dtype: torch.dtype) -> None:
    patterns = (
        torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 3.1e-8])
    values = torch.cat((patterns[patterns.isfinite()][:2048], edges, torch.randn(4096)))
    values = values[: len(values) // 16 * 16].view(-1, 1, 16)
    slots = torch.arange(len(values))

    def run() -> Tensor:
        kv = torch.zeros(len(values), 1, 2, 1, 1, 16, dtype=dtype)
        ops.write_kv(kv, 0, values, -values, slots)
        return kv

    kv = everywhere(run)
    assert same_bits(kv[:, 0, 0, 0], values.to(dtype))
    assert same_bits(kv[:, 0, 1, 0], (-values).to(dtype))


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 1000, 1024, 1025, 5003])
def test_sampling_operators_have_the_written_bits(vocabulary: int) -> None:
    logits = (torch.randn(5, vocabulary) * 4).mul(8).round().div(8)  # with ties
    ids = everywhere(lambda: ops.argmax(logits))
    assert torch.equal(ids, reference_fused.argmax(logits))
    total = everywhere(lambda: ops.logsumexp(logits))
    assert same_bits(total, written_order.logsumexp(logits))
    torch.testing.assert_close(total.double(), logits.double().logsumexp(1), rtol=1e-6, atol=1e-6)
    for k in {0, 1, min(vocabulary, 7), min(vocabulary, 50), vocabulary}:
        values, ranked = reference_fused.top_k(logits, k)
        assert same_bits(everywhere(lambda k=k: ops.top_k(logits, k)[0]), values)
        assert torch.equal(everywhere(lambda k=k: ops.top_k(logits, k)[1]), ranked)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_one_broken_logit_shows_wherever_it_is(vocabulary: int, broken: float) -> None:
    logits = torch.full((3, vocabulary), torch.finfo(torch.float32).max)
    assert everywhere(lambda: ops.finite_rows(logits)).all()
    for place in {0, vocabulary // 2, vocabulary - 1}:
        logits[1] = -torch.finfo(torch.float32).max
        logits[1, place] = broken
        assert everywhere(lambda: ops.finite_rows(logits)).tolist() == [True, False, True]


def test_a_row_of_logits_has_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(9, 3001)
    together = ops.logsumexp(logits)
    for row in range(9):
        assert same_bits(ops.logsumexp(logits[row : row + 1]), together[row : row + 1])


def test_sampling_of_masked_and_broken_logits() -> None:
    nothing = torch.full((1, 40), -torch.inf)
    assert ops.argmax(nothing).item() == 0
    assert ops.logsumexp(nothing).item() == -torch.inf
    one = nothing.clone()
    one[0, 33] = -5.0
    one[0, 7] = torch.nan
    assert ops.argmax(one).item() == 33
    values, ids = ops.top_k(one, 2)
    assert ids[0, 0] == 33
    assert values.tolist() == [[-5.0, -torch.inf]]


def test_operators_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"add_rms_norm: x has shape \[2, 3\], expected \[2, 4\]"):
        ops.add_rms_norm(torch.ones(2, 4), torch.ones(2, 3), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"fused_gated_activation: gate_up has shape \[2, 3\]"):
        ops.fused_gated_activation(torch.ones(2, 3), "silu")
    with pytest.raises(ValueError, match="top_k: k is 5, expected 0 to 4"):
        ops.top_k(torch.ones(1, 4), 5)
    kv = torch.zeros(2, 1, 2, 2, 4, 8)
    table = torch.ones(6, 4)
    fitting = (torch.ones(3, 48), None, None, 1e-5, table, table, torch.arange(3), torch.arange(3), kv, 0)
    for index, wrong, message in (
        (0, torch.ones(3, 47), r"qkv has shape \[3, 47\], expected"),
        (0, torch.ones(3, 48).double(), "qkv has dtype torch.float64, expected torch.float32"),
        (1, torch.ones(7), r"q_norm has shape \[7\], expected \[8\]"),
        (5, torch.ones(6, 5), r"sin has shape \[6, 5\], expected \[6, 4\]"),
        (6, torch.arange(4, 7), "positions are 4 to 6, expected 0 to 5"),
        (7, torch.arange(6, 9), "slots are 6 to 8, expected 0 to 7"),
        (9, 1, "layer is 1, expected 0 to 0"),
    ):
        arguments = list(fitting)
        arguments[index] = wrong
        with pytest.raises(ValueError, match=f"rope_write_kv: {message}"):
            ops.rope_write_kv(*arguments)
