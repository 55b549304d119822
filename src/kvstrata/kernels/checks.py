"""Shape and dtype checks that the operators share: what was given and what would be right, in one line."""

from __future__ import annotations

import torch
from torch import Tensor


def expect_shape(operator: str, name: str, tensor: Tensor, expected: tuple[int | str, ...]) -> None:
    """Raise ValueError unless `tensor` has `expected`'s sizes; a string names an axis of any size."""
    shape = tensor.shape
    if len(shape) == len(expected) and all(
        isinstance(want, str) or size == want for size, want in zip(shape, expected, strict=True)
    ):
        return
    wanted = ", ".join(str(size) for size in expected)
    raise ValueError(f"{operator}: {name} has shape {list(shape)}, expected [{wanted}]")


def expect_dtype(operator: str, name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    """Raise ValueError unless `tensor` has one of the `expected` dtypes."""
    if tensor.dtype not in expected:
        wanted = " or ".join(str(dtype) for dtype in expected)
        raise ValueError(f"{operator}: {name} has dtype {tensor.dtype}, expected {wanted}")


def expect_contiguous(operator: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor`'s elements lie one after another."""
    if not tensor.is_contiguous():
        raise ValueError(f"{operator}: {name} has strides {list(tensor.stride())}, expected contiguous")


def expect_layer(operator: str, kv: Tensor, layer: int, *quantised: torch.dtype) -> None:
    """Raise ValueError unless `kv` is a group's pool of floats or a `quantised` dtype that holds `layer`."""
    expect_shape(
        operator, "kv", kv, ("num_blocks", "group_layers", 2, "num_kv_heads", "block_size", "head_dim")
    )
    if not kv.dtype.is_floating_point and kv.dtype not in quantised:
        raise ValueError(
            f"{operator}: kv has dtype {kv.dtype}, expected a floating point dtype, int8 or uint8"
        )
    if not 0 <= layer < kv.shape[1]:
        raise ValueError(f"{operator}: layer is {layer}, expected 0 to {kv.shape[1] - 1} (kv's layers)")
