"""One vector added to every key after RoPE: softmax does not see it, quantised keys must hardly."""

from __future__ import annotations

import math

import pytest
import torch

from kvstrata.kernels import kv_formats
from tests.kernels.quantised_pool import LAYER, Case, ops

LENGTH = 90


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("size", [3.0, 30.0])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8", "int4"])
def test_attention_stays_within_what_half_a_step_of_each_key_can_do(
    fmt: str, size: float, window: int
) -> None:
    """A score is off by at most e = scale * sum |q| * half a step, so a weight by a factor of e^(2 e), and
    the output by that times the values' spread, beside what the values' own steps do.
    """
    torch.manual_seed(0)
    case = Case(fmt, 100)
    query = torch.randn(100, 6, 64)
    vector = torch.zeros(64)
    vector[[3, 40]] = torch.tensor([size, -size])
    exact = Case("fp32", 100)
    exact.key, exact.value = case.key, case.value
    exact.write()
    plain = exact_attention(exact, query, window)
    case.key = case.key + vector
    case.write()
    got = case.attend(query, 100, window)
    turned = kv_formats.rotate(query) if fmt == "int4" else query
    reach = case.scale * (turned.abs().sum(-1) * half_step(case, 0)).amax()
    spread = case.value.abs().max()
    bound = spread * (torch.expm1(2 * reach)) + half_step(case, 1)
    error = (got - plain).abs()
    assert error.max() <= bound
    assert error.square().mean().sqrt() < {"int8": 0.05, "fp8_e4m3": 0.25, "int4": 0.4}[fmt] * max(
        1.0, size / 10
    )


def exact_attention(case: Case, query: torch.Tensor, window: int) -> torch.Tensor:
    return case.attend(query, 100, window)


def half_step(case: Case, part: int) -> torch.Tensor:
    """The largest distance of an element from what it is read as."""
    scales = case.stored(part)[1]
    if case.pool.kv.dtype == torch.uint8:
        return kv_formats.int4_steps(scales).max() / 2
    scales = scales.float()
    if case.pool.kv.dtype == torch.int8:
        return scales.max() / 2
    return scales.max() * 448 / 16 / 2  # e4m3's widest step is 32 of 448


@pytest.mark.parametrize("kind", ["one channel", "all channels", "each channel"])
def test_a_vector_that_is_taken_off_as_an_offset_costs_nothing(kind: str) -> None:
    torch.manual_seed(0)
    case = Case("int4", LENGTH)
    vector = torch.zeros(2, 64)
    if kind == "one channel":
        vector[:, 5] = 40.0
    elif kind == "all channels":
        vector += 10.0
    else:
        vector += torch.randn(2, 64) * 8.0
    query = torch.randn(1, 6, 64)
    exact = Case("fp32", LENGTH)
    exact.key, exact.value = case.key, case.value
    exact.write()
    expected = exact.attend(query, LENGTH)
    case.write()
    plain = (case.attend(query, LENGTH)[0] - expected[0]).abs().max()
    still = torch.zeros(LENGTH, 32)
    heads = torch.cat((query.expand(LENGTH, -1, -1), case.key + vector, case.value), dim=1)
    ops.rope_write_kv(
        heads.reshape(LENGTH, -1),
        None,
        None,
        1e-6,
        still.cos(),
        still.sin(),
        None,
        case.slots,
        case.pool.kv,
        LAYER,
        case.pool.scales,
        vector,
    )
    error = (case.attend(query, LENGTH)[0] - expected[0]).abs().max()
    assert math.isclose(error, plain, rel_tol=0.05)
