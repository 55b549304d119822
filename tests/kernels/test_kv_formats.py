"""Quantised pools: what is stored, how exactly it is read, and the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvstrata import kernels
from kvstrata.kernels import kv_formats, reference, written_order
from tests.kernels.native import everywhere, needs_native, same_bits, threads
from tests.kernels.quantised_pool import LAYER, Case

ops = torch.ops.kvstrata
FORMATS = ("fp8_e4m3", "int8", "int4")
HEAD_DIMS = (8, 24, 40, 64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [2, 8, 12, 20, 24, 40, 64, 80, 96, 128, 256])
def test_rotation_keeps_lengths_and_angles(size: int) -> None:
    turned = kv_formats.rotate(torch.eye(size)).double()
    torch.testing.assert_close(turned @ turned.T, torch.eye(size).double(), rtol=0, atol=1e-6)
    assert torch.allclose(turned.abs(), torch.full_like(turned, 1 / math.sqrt(size)), atol=1e-6)


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_native_codes_and_scales_are_those_of_the_specification(fmt: str, head_dim: int) -> None:
    case = Case(fmt, 37, head_dim=head_dim, block_size=4)
    case.key[3], case.value[4], case.key[5] = 0.0, 3.0, 1e-30
    case.key[6, :, 1] *= 1000.0
    case.value[7] *= 1e30
    case.key[8] *= 1e-7
    case.value[9, 0, 0], case.value[10, 0, 1] = torch.nan, torch.inf

    def run() -> Tensor:
        case.write()
        return torch.cat([case.pool.payload(block) for block in range(case.pool.num_blocks)])

    native = everywhere(run)
    assert case.pool.scales is not None
    case.pool.kv.view(torch.uint8).fill_(0xFF)
    case.pool.scales.view(torch.uint8).fill_(0xFF)
    reference.write_kv(case.pool.kv, LAYER, case.key, case.value, case.slots, case.pool.scales)
    specified = torch.cat([case.pool.payload(block) for block in range(case.pool.num_blocks)])
    differs = native != specified
    if fmt != "int4":  # NaNs of a scale may carry other bits; nothing else may differ
        is_nan = [(x.view(case.pool.scales.dtype).isnan()) for x in (native, specified)]
        differs &= ~(is_nan[0] & is_nan[1]).repeat_interleave(2)
    assert not differs.any()


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("count", "window"), [(1, 0), (4, 70), (40, 0), (150, 20)])
def test_attention_is_right_on_every_instruction_set(
    fmt: str, head_dim: int, count: int, window: int
) -> None:
    case = Case(fmt, 150, head_dim=head_dim)
    case.write()
    query = torch.randn(count, 6, head_dim)
    out = everywhere(lambda: case.attend(query, 150, window))
    torch.testing.assert_close(out.double(), case.expected(query, window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("count", [3, 60])
def test_the_reference_reads_the_same_pool(fmt: str, count: int) -> None:
    case = Case(fmt, 100)
    case.write()
    query = torch.randn(count, 6, 64)
    starts, lens = torch.tensor([0, count]).int(), torch.tensor([100]).int()
    pool = case.pool
    out = reference.paged_attention(
        query, pool.kv, LAYER, case.table, starts, lens, case.scale, 0, pool.scales
    )
    torch.testing.assert_close(out.double(), case.expected(query), rtol=2e-5, atol=2e-5)
    prepared = kernels.prepare_attention(pool.kv, case.table, starts, lens, 0, pool.scales)
    torch.testing.assert_close(prepared.attend(query, pool.kv, LAYER, case.scale), out, rtol=2e-5, atol=2e-5)


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 16), (40, 3), (256, 16)])
@pytest.mark.parametrize("window", [0, 70])
def test_bits_are_those_of_the_written_order(fmt: str, head_dim: int, block_size: int, window: int) -> None:
    length, heads_per_kv = 150, 3
    case = Case(fmt, length, head_dim=head_dim, block_size=block_size)
    case.write()
    query = torch.randn(length, 2 * heads_per_kv, head_dim)
    out = case.attend(query, length, window)
    turned = kv_formats.rotate(query) if fmt == "int4" else query
    parts = case.read()
    scales: list[Tensor] = []
    if fmt != "int4":
        unit = 256.0 if fmt == "fp8_e4m3" else 1.0
        stored = [case.stored(part) for part in (0, 1)]
        parts = (stored[0][0].float() / unit, stored[1][0].float() / unit)
        scales = [steps.float() * unit for _, steps in stored]
    for position in (0, 1, 15, 16, 63, 64, 100, 149):
        first = max(0, position - window + 1) if window else 0
        for kv_head in (0, 1):
            heads = slice(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv)
            keys, values = (x[: position + 1, kv_head] for x in parts)
            steps = [x[: position + 1, kv_head, 0] for x in scales]
            specified = written_order.attention(
                turned[position, heads], keys, values, case.scale, first, *steps
            )
            assert same_bits(out[position, heads], specified), (position, kv_head)


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_has_the_same_bits_however_it_is_cut(fmt: str) -> None:
    length = 277
    case = Case(fmt, length)
    case.write()
    query = torch.randn(length, 6, 64)
    whole = case.attend(query, length)
    for chunk in (1, 5, 17, 100):
        for number in (1, 2):
            with threads(number):
                parts = [
                    case.attend(query[start : start + chunk], min(start + chunk, length))
                    for start in range(0, length, chunk)
                ]
            assert same_bits(torch.cat(parts), whole), (chunk, number)


@needs_native
@pytest.mark.parametrize("fmt", FORMATS)
def test_rope_write_kv_writes_what_its_steps_write(fmt: str) -> None:
    case = Case(fmt, 20)
    angles = torch.randn(20, 32)
    qkv = torch.randn(20, (4 + 2 * 2) * 64)
    heads = qkv.view(20, 8, 64)
    case.key = ops.rope(heads[:, 4:6], angles.cos(), angles.sin())
    case.value = heads[:, 6:].contiguous()
    case.write()
    expected = [x.clone() for part in (0, 1) for x in case.stored(part)]
    case.pool.payload(0).zero_()
    query = ops.rope_write_kv(
        qkv,
        None,
        None,
        1e-6,
        angles.cos(),
        angles.sin(),
        None,
        case.slots,
        case.pool.kv,
        LAYER,
        case.pool.scales,
    )
    assert same_bits(query, ops.rope(heads[:, :4], angles.cos(), angles.sin()))
    stored = [x for part in (0, 1) for x in case.stored(part)]
    assert all(same_bits(a, b) for a, b in zip(expected, stored, strict=True))


@pytest.mark.parametrize("fmt", ["bf16", *FORMATS])
def test_an_offset_of_the_keys_is_taken_off_after_rope(fmt: str) -> None:
    case = Case(fmt, 20)
    angles = torch.randn(20, 32)
    qkv, offset = torch.randn(20, (4 + 2 * 2) * 64), torch.randn(2, 64)
    heads = qkv.view(20, 8, 64)
    case.key = ops.rope(heads[:, 4:6], angles.cos(), angles.sin()) - offset
    case.value = heads[:, 6:].contiguous()
    case.write()

    def payload() -> Tensor:
        return torch.cat([case.pool.payload(block) for block in range(case.pool.num_blocks)])

    expected = payload()
    arguments = (qkv, None, None, 1e-6, angles.cos(), angles.sin(), None, case.slots)
    write = everywhere if kernels.backend() != "reference" else (lambda run: run())
    for block in range(case.pool.num_blocks):
        case.pool.payload(block).fill_(0xFF)

    def run() -> Tensor:
        ops.rope_write_kv(*arguments, case.pool.kv, LAYER, case.pool.scales, offset)
        return payload()

    assert torch.equal(write(run), expected)
    with pytest.raises(ValueError, match="key_offset has shape"):
        ops.rope_write_kv(*arguments, case.pool.kv, LAYER, case.pool.scales, offset[:1])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_scales_that_do_not_fit_are_named(backend: str) -> None:
    if backend == "native" and kernels.backend() == "reference":
        pytest.skip("the native kernels were not built")
    write = ops.write_kv if backend == "native" else reference.write_kv
    case = Case("int8", 4)
    kv, scales = case.pool.kv, case.pool.scales
    assert scales is not None
    data = (LAYER, case.key, case.value, case.slots)
    with pytest.raises(ValueError, match=r"scales are missing, expected them for a pool of torch\.int8"):
        write(kv, *data)
    with pytest.raises(ValueError, match=r"scales are given, expected none for a pool of torch\.bfloat16"):
        write(torch.zeros(kv.shape, dtype=torch.bfloat16), *data, scales)
    with pytest.raises(ValueError, match=r"scales has dtype torch\.float16, expected torch\.bfloat16"):
        write(kv, *data, scales.half())
    with pytest.raises(ValueError, match="scales has shape"):
        write(kv, *data, scales[..., :0])
    packed = torch.zeros(2, 1, 2, 1, 4, 36, dtype=torch.uint8)
    with pytest.raises(ValueError, match="kv has head_dim 72 in int4, expected a power of two"):
        write(packed, 0, case.key, case.value, case.slots, packed.half())
