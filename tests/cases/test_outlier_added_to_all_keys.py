"""A large vector added to all keys after RoPE: exact attention does not change, quantised must not be lost.

The bound. A key is read at most half a step a channel from what it was, so no score moves by more than d =
scale * sum over channels of |query| * step / 2. Weights of a softmax whose scores move by d at most move by a
factor of e^(2 d) at most; and each value moves by half a step of its own.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvstrata.kernels import kv_formats
from tests.kernels.quantised_pool import LAYER, Case, ops

LENGTH = 90


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def outlier(kind: str) -> Tensor:
    vector = torch.zeros(2, 64)
    if kind == "one channel":
        vector[:, 5] = 40.0
    elif kind == "all channels":
        vector += 10.0
    else:
        vector += torch.randn(2, 64) * 8.0
    return vector


def exact(query: Tensor, case: Case) -> Tensor:
    keys, values = (x.double().repeat_interleave(3, 1) for x in (case.key, case.value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * case.scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def steps(case: Case, fmt: str, part: int) -> Tensor:
    """Of each channel of each token: twice what it may be read wrong by."""
    scales = case.stored(part)[1]
    if fmt == "int4":
        return kv_formats.int4_steps(scales).repeat_interleave(16, dim=-1)
    if fmt == "int8":
        return scales.float().expand(-1, -1, 64)
    return torch.maximum(case.read()[part].abs() / 8, scales.float() * 2**-9)  # e4m3: 3 bits of mantissa


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("kind", ["one channel", "all channels", "each channel"])
def test_the_error_of_attention_stays_within_the_bound(fmt: str, kind: str) -> None:
    case = Case(fmt, LENGTH)
    query = torch.randn(1, 6, 64)
    expected = exact(query, case)
    plain_key = case.key
    case.key = plain_key + outlier(kind)
    case.write()
    out = case.attend(query, LENGTH)
    turned = kv_formats.rotate(query) if fmt == "int4" else query
    key_steps, value_steps = (steps(case, fmt, part).repeat_interleave(3, 1) for part in (0, 1))
    moved = case.scale * (turned.abs() * key_steps).sum(-1).amax(0) / 2 * 1.01
    spread = case.value.abs().amax(0).repeat_interleave(3, 0)
    bound = (moved.mul(2).exp() - 1).unsqueeze(-1) * spread + value_steps.amax(0) / 2
    error = (out[0] - expected[0]).abs()
    assert (error <= bound).all()
    assert error.max() < 1.5  # values are of size 1: what comes out is no noise


@pytest.mark.parametrize("kind", ["one channel", "all channels", "each channel"])
def test_an_outlier_that_is_taken_off_as_an_offset_costs_nothing(kind: str) -> None:
    case, vector = Case("int4", LENGTH), outlier(kind)
    query = torch.randn(1, 6, 64)
    expected = exact(query, case)
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
