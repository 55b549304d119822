"""RoPE tables: the angles that the definition gives, at any position."""

from __future__ import annotations

import math

import pytest
import torch

from kvstrata.models.config import RopeConfig
from kvstrata.models.rope import RopeTable, inverse_frequencies, magnitude

CPU = torch.device("cpu")
LLAMA3 = RopeConfig(500_000.0, "llama3", factor=8.0, original_max_position=8192)


def test_angles_stay_exact_at_far_positions() -> None:
    positions = [0, 1, 4095, 131_071]
    cos, sin = RopeTable(RopeConfig(10_000.0), 8, CPU).at(torch.tensor(positions), positions[-1] + 1)
    for row, position in enumerate(positions):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            assert cos[row, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[row, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_a_table_that_grew_keeps_its_first_rows() -> None:
    table, first = RopeTable(LLAMA3, 16, CPU), torch.arange(100)
    before = table.at(first, 100)
    table.at(torch.tensor([5000]), 5001)
    after = table.at(first, 100)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_linear_scaling_divides_positions() -> None:
    stretched = RopeTable(RopeConfig(10_000.0, "linear", factor=4.0), 16, CPU).at(torch.tensor([40]), 41)
    plain = RopeTable(RopeConfig(10_000.0), 16, CPU).at(torch.tensor([10]), 11)
    torch.testing.assert_close(stretched, plain, rtol=0, atol=1e-7)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = inverse_frequencies(RopeConfig(500_000.0), 128), inverse_frequencies(LLAMA3, 128)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = scaled[(turns > 1) & (turns < 4)] / plain[(turns > 1) & (turns < 4)]
    assert len(between) > 2
    assert (between.diff() < 0).all()


def test_frequency_factors_of_a_file_stand_for_the_scaling_they_were_made_from() -> None:
    plain, scaled = inverse_frequencies(RopeConfig(500_000.0), 128), inverse_frequencies(LLAMA3, 128)
    given = RopeConfig(500_000.0, freq_factors=tuple((plain / scaled).tolist()))
    torch.testing.assert_close(inverse_frequencies(given, 128), scaled)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scales_cosines_and_sines(changes: dict[str, float], expected: float) -> None:
    config = RopeConfig(
        **{"theta": 10_000.0, "kind": "yarn", "factor": 4.0, "original_max_position": 64, **changes}
    )
    assert magnitude(config) == pytest.approx(expected)
    cos, sin = RopeTable(config, 16, CPU).at(torch.tensor([9]), 10)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((1, 8), expected**2))


def test_yarn_without_truncation_moves_the_ramp() -> None:
    config = RopeConfig(10_000.0, "yarn", factor=4.0, original_max_position=64)
    untruncated = RopeConfig(10_000.0, "yarn", factor=4.0, original_max_position=64, truncate=False)
    assert not torch.equal(inverse_frequencies(config, 64), inverse_frequencies(untruncated, 64))


def test_yarn_with_both_ends_of_the_ramp_on_one_dimension_is_a_step() -> None:
    config = RopeConfig(10_000.0, "yarn", factor=4.0, original_max_position=2, beta_fast=32, beta_slow=32)
    assert inverse_frequencies(config, 16).isfinite().all()


@pytest.mark.parametrize("config", [RopeConfig(10_000.0), LLAMA3])
def test_far_positions_have_the_same_bits_whatever_is_asked_beside_them(config: RopeConfig) -> None:
    positions = torch.tensor([0, 5, 8191, 8192, 8193, 20_000, 299_999, 8255, 8256])
    together = RopeTable(config, 64, CPU).at(positions, 300_000)
    for row, position in enumerate(positions.tolist()):
        alone = RopeTable(config, 64, CPU).at(torch.tensor([position]), position + 1)
        for part, own in zip(together, alone, strict=True):
            assert torch.equal(part[row], own[0])
    angles = torch.outer(positions.double(), inverse_frequencies(config, 64))
    torch.testing.assert_close(together[0], angles.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(together[1], angles.sin().float(), rtol=0, atol=1e-7)


def test_an_endless_stream_of_positions_keeps_a_bounded_table() -> None:
    table = RopeTable(RopeConfig(10_000.0), 16, CPU)
    for start in range(0, 200_000, 1000):
        table.at(torch.arange(start, start + 1000), start + 1000)
    kept = len(table._cos) + sum(len(cos) for cos, _ in table._pages.values())
    assert kept <= 8192 + 128 * 64
