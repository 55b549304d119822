"""Products with packed weights: the bits of their specification, whatever rows, threads, instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.kernels import backend, reference_linear, reference_pack
from kvstrata.kernels.native import INSTRUCTION_SETS
from kvstrata.kernels.packed_layout import open_packed
from kvstrata.kernels.packing import PackedWeight, pack
from kvstrata.models.linear import PackedLinear

OPS = torch.ops.kvstrata
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K")
FORMATS = ("F32", "F16", "BF16", *BLOCK_FORMATS)
U8 = torch.uint8
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}

native = pytest.mark.skipif(backend() == "reference", reason="the native kernels are not in use")


def supported_instruction_sets() -> list[str]:
    if backend() == "reference":
        return []
    before = OPS.instruction_set()
    found = []
    for name in INSTRUCTION_SETS:
        try:
            OPS.use_instruction_set(name)
        except ValueError:
            continue
        found.append(name)
    OPS.use_instruction_set(before)
    return found


@pytest.fixture(autouse=True)
def same_settings_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    chosen = None if backend() == "reference" else OPS.instruction_set()
    yield
    torch.set_num_threads(threads)
    if chosen is not None:
        OPS.use_instruction_set(chosen)


def stored_rows(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Random weights as a file stores them, extreme codes included: uint8 [outputs, bytes per row]."""
    rng = np.random.default_rng(seed)
    if kind in reference_pack.FLOATS:
        values = torch.from_numpy(rng.standard_normal((outputs, inputs)).astype(np.float32) / 20)
        return values.to(reference_pack.FLOATS[kind]).view(torch.uint8).numpy()
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (outputs, inputs // block_inputs, block_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        halves = (rng.standard_normal(blocks.shape[:2]) / 100).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves.view(np.uint8).reshape(*halves.shape, 2)
    return blocks.reshape(outputs, -1)


def packed(kind: str, outputs: int, inputs: int, seed: int = 0, target: str = "auto") -> PackedWeight:
    rows = stored_rows(kind, outputs, inputs, seed)
    return pack(kind, (outputs, inputs), rows, target=target)  # type: ignore[arg-type]


def unit(kind: str) -> int:
    return reference_pack.BLOCKS[kind][0]


def rows_of(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, inputs), generator=generator) * 3


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    numbers = ~want.isnan()
    assert torch.equal(numbers, ~got.isnan())
    zero = torch.zeros(())
    got_bits = torch.where(numbers, got, zero).view(torch.int32)
    assert torch.equal(got_bits, torch.where(numbers, want, zero).view(torch.int32))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_packed_weights_dequantise_to_the_values_of_the_file(kind: str) -> None:
    rows = stored_rows(kind, 37, 768)
    weight = pack(kind, (37, 768), rows)
    want = torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[kind]))
    assert torch.equal(weight.rows(torch.arange(37)), want)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_packed_weights_take_at_most_a_tenth_more_than_the_file(kind: str) -> None:
    rows = stored_rows(kind, 64, 768)
    size = pack(kind, (64, 768), rows).nbytes
    # Q5_0 keeps its five bits in eight: only int8 holds them.
    assert size - 64 <= (34 / 22 if kind == "Q5_0" else 1.1) * rows.size


def test_int8_nearly_hits_the_values_of_a_four_bit_file() -> None:
    rows = stored_rows("Q4_1", 40, 320)
    values = quants.dequantize(rows, GGMLQuantizationType.Q4_1).astype(np.float32)
    weight = pack("F32", (40, 320), values.view(np.uint8), target="int8")
    groups = torch.from_numpy(values).view(40, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    plain = (groups - (groups / scale).round() * scale).square().sum()
    found = (weight.rows(torch.arange(40)).view_as(groups) - groups).square().sum()
    assert found < 0.5 * plain


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("target", "levels"), [("int8", 2 * 112), ("int4", 15)])
def test_quantising_errs_by_half_a_step(kind: str, target: str, levels: int) -> None:
    rows = stored_rows(kind, 20, 320)
    values = torch.from_numpy(rows).view(reference_pack.FLOATS[kind]).float()
    weight = pack(kind, (20, 320), rows, target=target)  # type: ignore[arg-type]
    groups = values.view(20, -1, 32)
    if target == "int8":
        span = 2 * groups.abs().amax(-1, keepdim=True)
    else:
        span = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    error = (weight.rows(torch.arange(20)).view_as(groups) - groups).abs()
    # Scale and minimum are rounded outwards to fp16: 2^-10 of the largest value at most.
    slack = groups.abs().amax(-1, keepdim=True) * 2**-9
    assert bool(
        (error <= span / levels / 2 * (1 + 2**-9) + slack / levels + 2**-24).all() or target == "int4"
    )
    assert bool((error <= span / levels / 2 + slack).all())


@pytest.mark.parametrize("kind", ["Q5_1", "Q5_K"])
def test_other_block_formats_become_int8(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = np.random.default_rng(1).integers(0, 64, (8, 256 // size[0] * size[1]), dtype=np.uint8)
    if kind == "Q5_1":
        rows = quants.quantize(values, GGMLQuantizationType[kind])
    want = torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[kind]))
    weight = pack(kind, (8, 256), rows)
    assert open_packed("test", weight.data).format == "int8"
    torch.testing.assert_close(weight.rows(torch.arange(8)), want, atol=float(want.abs().max()) / 200, rtol=0)


@native
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("target", ["auto", "int4"])
def test_packing_writes_the_bytes_of_the_reference(kind: str, target: str) -> None:
    if target == "int4" and kind not in reference_pack.FLOATS:
        pytest.skip("only floats have a choice")
    inputs = 256 if unit(kind) == 256 else 96 if unit(kind) == 32 else 75
    rows = torch.from_numpy(stored_rows(kind, 21, inputs))
    order = torch.randperm(21, generator=torch.Generator().manual_seed(3))
    arguments = (rows, kind, 21, inputs, target, order)
    assert torch.equal(OPS.pack_weight(*arguments), reference_pack.pack_weight(*arguments))


@native
@pytest.mark.parametrize("target", ["int8", "int4"])
def test_packing_agrees_with_the_reference_on_odd_weights(target: str) -> None:
    values = torch.zeros((9, 64))
    values[1] = torch.inf
    values[2, 5] = torch.nan
    values[3] = 3e38
    values[4] = 1e-9
    values[5, ::2] = -4e-5
    values[6] = 7.25
    values[7] = -torch.arange(64) * 1e4
    values[8, 40] = 1.5e-45
    arguments = (values.view(torch.uint8), "F32", 9, 64, target)
    assert torch.equal(OPS.pack_weight(*arguments), reference_pack.pack_weight(*arguments))


@native
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_product_has_the_bits_of_the_reference(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(FORMATS))
    target = data.draw(st.sampled_from(["auto", "int4"])) if kind in reference_pack.FLOATS else "auto"
    inputs = unit(kind) * data.draw(
        st.integers(1, 2 if unit(kind) == 256 else 5 if unit(kind) == 32 else 140)
    )
    outputs = data.draw(st.integers(1, 70))
    count = data.draw(st.integers(0, 70))
    seed = data.draw(st.integers(0, 1000))
    weight = packed(kind, outputs, inputs, seed, target)
    x = rows_of(count, inputs, seed)
    want = reference_linear.linear(x, [weight.data])
    for name in supported_instruction_sets():
        OPS.use_instruction_set(name)
        assert_same_bits(OPS.linear(x, [weight.data]), want)


@native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kind: str, threads: int) -> None:
    torch.set_num_threads(threads)
    weight = packed(kind, 200, 512)
    x = rows_of(150, 512)
    for name in supported_instruction_sets():
        OPS.use_instruction_set(name)
        alone = torch.cat([OPS.linear(x[i : i + 1], [weight.data]) for i in range(len(x))])
        for count in (2, 3, 5, 6, 7, 13, 18, 19, 64, 150):
            assert_same_bits(OPS.linear(x[:count], [weight.data]), alone[:count])
        assert_same_bits(OPS.linear(x[31:77], [weight.data]), alone[31:77])


@native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_extreme_codes_and_activations_do_not_saturate(kind: str) -> None:
    rows = stored_rows(kind, 32, 512)
    blocks = rows.reshape(32, -1, reference_pack.BLOCKS[kind][1])
    kept = [blocks[:, :, offset : offset + 2].copy() for offset in HALVES[kind]]
    for byte in (0xFF, 0x80, 0x7F, 0x00):
        blocks[:] = byte
        for offset, halves in zip(HALVES[kind], kept, strict=True):
            blocks[:, :, offset : offset + 2] = halves
        weight = pack(kind, (32, 512), rows)
        x = torch.ones((3, 512))
        x[1] = -1
        x[2, ::2] = -1
        want = reference_linear.linear(x, [weight.data])
        for name in supported_instruction_sets():
            OPS.use_instruction_set(name)
            assert_same_bits(OPS.linear(x, [weight.data]), want)


@native
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_values_that_are_not_finite_spoil_their_row_alone(kind: str, count: int) -> None:
    weight = packed(kind, 40, 256)
    x = rows_of(count, 256)
    clean = OPS.linear(x, [weight.data])
    for value in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[count // 2, 17] = value
        want = clean.clone()
        want[count // 2] = torch.nan
        for name in supported_instruction_sets():
            OPS.use_instruction_set(name)
            assert_same_bits(OPS.linear(spoiled, [weight.data]), want)


@native
def test_tiny_and_huge_activations_agree_with_the_reference() -> None:
    weight = packed("Q4_1", 16, 160)
    x = rows_of(6, 160)
    x[0] = 0
    x[1] *= 1e-40
    x[2] *= 1e-31
    x[3] *= 1e37
    x[4, :32] = torch.linspace(-127, 127, 32) * 0.5  # halves: ties go to even
    x[5, 64:] = 0
    want = reference_linear.linear(x, [weight.data])
    for name in supported_instruction_sets():
        OPS.use_instruction_set(name)
        assert_same_bits(OPS.linear(x, [weight.data]), want)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_product_is_close_to_that_of_the_float_weights(kind: str) -> None:
    weight = packed(kind, 48, 512)
    x = rows_of(9, 512)
    want = x @ weight.rows(torch.arange(48)).T
    got = OPS.linear(x, [weight.data])
    assert float((got - want).norm() / want.norm()) < 0.01  # activations have 8 bits


def test_several_weights_of_mixed_formats_are_laid_end_to_end() -> None:
    weights = tuple(packed(kind, outputs, 256) for kind, outputs in (("Q4_K", 40), ("Q6_K", 8), ("Q8_0", 17)))
    x = rows_of(5, 256)
    bias = torch.linspace(-1, 1, 65)
    joined = PackedLinear(weights, bias)(x)
    apart = torch.cat([OPS.linear(x, [weight.data]) for weight in weights], dim=1)
    assert_same_bits(joined, apart + bias)


def test_row_order_moves_rows() -> None:
    rows = stored_rows("Q4_0", 24, 64)
    order = np.random.default_rng(5).permutation(24)
    moved = pack("Q4_0", (24, 64), rows, row_order=order)
    plain = pack("Q4_0", (24, 64), rows[order])
    assert torch.equal(moved.data, plain.data)


def test_strided_rows_give_the_bits_of_contiguous_ones() -> None:
    weight = packed("Q8_0", 20, 96)
    wide = rows_of(7, 200)
    want = OPS.linear(wide[:, 50:146].contiguous(), [weight.data])
    assert_same_bits(OPS.linear(wide[:, 50:146], [weight.data]), want)
    assert_same_bits(OPS.linear(wide[:, 50:146].T.contiguous().T, [weight.data]), want)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x, w: OPS.linear(x.double(), [w]), "float32"),
        (lambda x, w: OPS.linear(x[:, :40], [w]), r"64\]"),
        (lambda x, w: OPS.linear(x[0], [w]), "num_tokens"),
        (lambda x, w: OPS.linear(x, []), "at least 1"),
        (lambda x, w: OPS.linear(x, [w[:-1]]), "expected"),
        (lambda x, w: OPS.linear(x, [w[:10]]), "header"),
        (lambda x, w: OPS.linear(x, [torch.zeros(4096, dtype=torch.uint8)]), "header"),
        (lambda x, w: OPS.linear(x, [w.to(torch.int32)]), "uint8"),
        (lambda x, w: OPS.linear(x, [w], torch.zeros(3)), "bias"),
        (lambda x, w: OPS.packed_embedding(torch.tensor([20]), w), "0 to 19"),
        (lambda x, w: OPS.packed_embedding(torch.tensor([-1]), w), "0 to 19"),
        (lambda x, w: OPS.packed_embedding(torch.tensor([1.0]), w), "int64"),
        (
            lambda x, w: OPS.pack_weight(torch.zeros((4, 34), dtype=U8), "Q3_K", 4, 32, "auto"),
            "Q3_K",
        ),
        (lambda x, w: OPS.pack_weight(torch.zeros((4, 34), dtype=U8), "Q8_0", 4, 33, "auto"), "33"),
        (lambda x, w: OPS.pack_weight(torch.zeros((4, 33), dtype=U8), "Q8_0", 4, 32, "auto"), "34"),
        (
            lambda x, w: OPS.pack_weight(torch.zeros((4, 34), dtype=U8), "Q8_0", 4, 32, "int4"),
            "int4",
        ),
        (
            lambda x, w: OPS.pack_weight(torch.zeros((4, 34), dtype=U8), "Q8_0", 4, 32, "int2"),
            "int2",
        ),
        (
            lambda x, w: OPS.pack_weight(
                torch.zeros((2, 34), dtype=U8), "Q8_0", 2, 32, "auto", torch.tensor([0, 2])
            ),
            "0 to 1",
        ),
    ],
)
def test_arguments_that_do_not_fit_raise_value_error(
    change: Callable[[torch.Tensor, torch.Tensor], object], expected: str
) -> None:
    weight = packed("Q8_0", 20, 64)
    with pytest.raises(ValueError, match=expected):
        change(rows_of(2, 64), weight.data)


def test_an_empty_batch_gives_an_empty_product() -> None:
    weight = packed("Q4_1", 20, 64)
    assert OPS.linear(torch.empty((0, 64)), [weight.data]).shape == (0, 20)
    assert weight.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_reference_fma_rounds_once() -> None:
    one, tiny = torch.tensor(1.0), torch.tensor(2.0**-60)
    # 1 + 2^-24 lies half way between two float32, and 2^-60 decides; float64 alone would lose it.
    a = torch.tensor(1 + 2.0**-12)
    want_up = reference_linear.fma(a, a, tiny * one)
    assert want_up.item() == 1 + 2.0**-11 + 2.0**-23
    assert reference_linear.fma(a, a, -tiny).item() == 1 + 2.0**-11
