"""Keys and values a quantised pool could get wrong: constants, outliers, numbers too large, no numbers."""

from __future__ import annotations

import pytest
import torch

from kvstrata.kernels import kv_formats
from tests.kernels.quantised_pool import Case

FORMATS = ("fp8_e4m3", "int8", "int4")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["zero", "three", "constant channel", "outlier channel", "tiny", "offset"])
def test_nothing_is_read_further_than_half_a_step_away(fmt: str, kind: str) -> None:
    case = Case(fmt, 50)
    for x in (case.key, case.value):
        if kind == "zero":
            x.zero_()
        elif kind == "three":
            x.fill_(3.0)
        elif kind == "constant channel":
            x[..., 5] = 2.0
        elif kind == "outlier channel":
            x[..., 5] *= 1000.0
        elif kind == "tiny":
            x.mul_(1e-6)
        else:
            x.add_(100.0)
    case.write()
    for part, (x, read) in enumerate(zip((case.key, case.value), case.read(), strict=True)):
        scales = case.stored(part)[1]
        scales = (kv_formats.int4_steps(scales) if fmt == "int4" else scales).float()
        assert scales.isfinite().all()
        error = (read - (kv_formats.rotate(x) if fmt == "int4" and part == 0 else x)).abs()
        if fmt == "int4":
            steps = scales.repeat_interleave(16, dim=-1)
        elif fmt == "int8":
            steps = scales
        else:  # e4m3 has 3 bits of mantissa, and steps of 2^-9 at the bottom
            steps = torch.maximum(2.0 * x.abs() / 16, scales * 2**-9)
        assert (error <= steps / 2 * (1 + 1e-4) + 1e-7 * x.abs()).all(), kind


def test_fp8_saturates_at_448_and_keeps_finite_numbers_finite() -> None:
    case = Case("fp8_e4m3", 6, kv_heads=1)
    case.value.zero_()
    case.value[:, 0, 0] = torch.tensor([448.0, 464.0, 465.0, 1000.0, torch.inf, torch.nan])
    case.value[:, 0, 1] = -1.0
    case.write()
    codes, scales = case.stored(1)
    read = case.read()[1][:, 0]
    assert codes.float()[:5, 0, 0].tolist() == [448.0] * 4 + [448.0]
    assert scales.isfinite().all()
    torch.testing.assert_close(read[:4, 0], case.value[:4, 0, 0], rtol=0.01, atol=0)
    assert read[4, 0] == 448.0 * scales[4, 0, 0].float()
    assert read[5, 0].isnan()
    assert read[:, 1:].isfinite().all()
    torch.testing.assert_close(read[4:, 1], torch.tensor([-1.0, -1.0]), rtol=0.01, atol=0)


@pytest.mark.parametrize("value", [464.0, 465.0, 1000.0, 3e38, torch.inf])
def test_fp8_codes_saturate_whatever_the_scale(value: float) -> None:
    x = torch.zeros(1, 8)
    x[0, 0], x[0, 1] = value, -value
    codes, scales = kv_formats.quantise(x, torch.float8_e4m3fn, key=True)
    assert codes.float()[0, :2].tolist() == [448.0, -448.0]
    assert scales.isfinite().all()


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_integers_pass_on_what_is_not_finite(fmt: str, bad: float) -> None:
    case = Case(fmt, 4)
    case.value[2, 1, 7] = bad
    case.write()
    read = case.read()[1]
    assert read[2, 1, : 16 if fmt == "int4" else 64].isnan().all()
    assert read[[0, 1, 3]].isfinite().all()
    assert read[2, 0].isfinite().all()


def test_rotation_makes_int4_keys_with_an_outlier_channel_far_better() -> None:
    key = torch.randn(200, 2, 64)
    key[..., 5] += 30.0
    query = torch.randn(200, 2, 64)
    exact = (query * key).sum(-1)
    turned = kv_formats.dequantise(*kv_formats.quantise(key, torch.uint8, key=True))
    plain = kv_formats.dequantise(*kv_formats.quantise(key, torch.uint8, key=False))
    with_rotation = ((kv_formats.rotate(query) * turned).sum(-1) - exact).square().mean().sqrt()
    without = ((query * plain).sum(-1) - exact).square().mean().sqrt()
    assert with_rotation < 0.8 * without
