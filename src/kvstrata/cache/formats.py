"""The formats in which keys and values can be stored, by name.

The 8-bit formats keep one bf16 scale for each token and head vector, whose range no key or value leaves; int4
keeps a scale and a zero, a byte each, for each 16 channels.
"""

from __future__ import annotations

import torch

from kvstrata.cache.layout import KVFormat
from kvstrata.errors import ConfigError
from kvstrata.kernels.kv_formats import can_rotate

FORMATS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat("fp32", bits=32),
        KVFormat("bf16", bits=16),
        KVFormat("fp16", bits=16),
        KVFormat("fp8_e4m3", bits=8, scale_bytes=2, scale_group=-1),
        KVFormat("int8", bits=8, scale_bytes=2, scale_group=-1),
        KVFormat("int4", bits=4, scale_bytes=2, scale_group=16, centred=True),
    )
}

POOL_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,  # two a byte
}
_SCALE_DTYPES = {"fp8_e4m3": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.uint8}


def format_named(name: str) -> KVFormat:
    """The format called `name`. Raises ConfigError listing all names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"KV format {name!r} is unknown: choose one of {', '.join(FORMATS)}") from None


def is_higher(name: str, other: str) -> bool:
    """Whether the format called `name` is another than `other`, and has at least its bits."""
    return name != other and format_named(name).bits >= format_named(other).bits


def pool_dtype(fmt: KVFormat) -> torch.dtype:
    """The torch dtype of the pool's elements; of its bytes where an element is half of one."""
    return POOL_DTYPES[fmt.name]


def scale_dtype(fmt: KVFormat) -> torch.dtype | None:
    """The torch dtype of a quantised format's scales; None where it has none."""
    return _SCALE_DTYPES.get(fmt.name)


def holds(fmt: KVFormat, head_dim: int) -> bool:
    """Whether the format can hold vectors of `head_dim` elements.

    int4 keys are rotated by a Hadamard matrix, which there is for powers of two, and those times 12 or 20.
    """
    return fmt.name != "int4" or can_rotate(head_dim)


def check_head_dim(fmt: KVFormat, head_dim: int) -> None:
    """Raise ConfigError where the format cannot hold vectors of `head_dim` elements."""
    if not holds(fmt, head_dim):
        raise ConfigError(
            f"kv_dtype is 'int4', whose keys are rotated, and heads of {head_dim} elements cannot be: "
            "only powers of two, and those times 12 or 20; int8 takes any"
        )
