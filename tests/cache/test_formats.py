from __future__ import annotations

import pytest
import torch

from kvstrata.cache.formats import format_named, pool_dtype
from kvstrata.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "values", "scales"),
    [
        ("fp32", 256, 0),
        ("bf16", 128, 0),
        ("fp16", 128, 0),
        ("fp8_e4m3", 64, 4),
        ("int8", 64, 4),
        ("int4", 32, 8),
    ],
)
def test_bytes_of_a_vector_of_64(name: str, values: int, scales: int) -> None:
    assert format_named(name).vector_bytes(64) == values
    assert format_named(name).vector_scale_bytes(64) == scales


def test_unknown_format_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'fp12' is unknown.*fp32, bf16"):
        format_named("fp12")


def test_pool_holds_floats_and_refuses_quantised_formats() -> None:
    assert pool_dtype(format_named("bf16")) is torch.bfloat16
    for name in ("fp8_e4m3", "int8", "int4"):
        with pytest.raises(ConfigError, match=f"'{name}' is not supported for the pool"):
            pool_dtype(format_named(name))
