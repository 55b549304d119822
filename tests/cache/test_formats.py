from __future__ import annotations

import pytest
import torch

from kvstrata.cache.formats import check_head_dim, format_named, pool_dtype, scale_dtype
from kvstrata.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "values", "scales"),
    [
        ("fp32", 256, 0),
        ("bf16", 128, 0),
        ("fp16", 128, 0),
        ("fp8_e4m3", 64, 2),
        ("int8", 64, 2),
        ("int4", 32, 8),
    ],
)
def test_bytes_of_a_vector_of_64(name: str, values: int, scales: int) -> None:
    assert format_named(name).vector_bytes(64) == values
    assert format_named(name).vector_scale_bytes(64) == scales


def test_unknown_format_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'fp12' is unknown.*fp32, bf16"):
        format_named("fp12")


@pytest.mark.parametrize(("name", "most"), [("fp8_e4m3", 0.53), ("int8", 0.53), ("int4", 0.32)])
def test_quantised_formats_keep_to_their_share_of_bf16(name: str, most: float) -> None:
    for head_dim in (64, 80, 96, 128, 256):
        fmt = format_named(name)
        share = (fmt.vector_bytes(head_dim) + fmt.vector_scale_bytes(head_dim)) / (2 * head_dim)
        assert share <= most


def test_every_format_has_a_dtype_and_quantised_ones_have_scales() -> None:
    assert pool_dtype(format_named("bf16")) is torch.bfloat16
    assert pool_dtype(format_named("int4")) is torch.uint8
    assert scale_dtype(format_named("bf16")) is None
    assert scale_dtype(format_named("int8")) is torch.bfloat16


@pytest.mark.parametrize("head_dim", [63, 72, 112, 2048])
def test_int4_refuses_heads_without_a_rotation_and_says_what_would_do(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"kv_dtype is 'int4'.*heads of {head_dim}.*int8 takes any"):
        check_head_dim(format_named("int4"), head_dim)
    check_head_dim(format_named("int8"), head_dim)
