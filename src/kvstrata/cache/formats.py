"""The formats in which keys and values can be stored, by name.

All of them can be sized; the pool holds those that `pool_dtype` maps to a torch dtype. The quantised
formats keep one fp32 scale for each token and head vector, int4 an fp16 scale and an fp16 zero point for
each 32 channels.
"""

from __future__ import annotations

import torch

from kvstrata.cache.layout import KVFormat
from kvstrata.errors import ConfigError

FORMATS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat("fp32", bits=32),
        KVFormat("bf16", bits=16),
        KVFormat("fp16", bits=16),
        KVFormat("fp8_e4m3", bits=8, scale_bytes=4, scale_group=-1),
        KVFormat("int8", bits=8, scale_bytes=4, scale_group=-1),
        KVFormat("int4", bits=4, scale_bytes=4, scale_group=32),
    )
}

POOL_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def format_named(name: str) -> KVFormat:
    """The format called `name`. Raises ConfigError listing all names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"KV format {name!r} is unknown: choose one of {', '.join(FORMATS)}") from None


def pool_dtype(fmt: KVFormat) -> torch.dtype:
    """The torch dtype of the pool's elements.

    Raises ConfigError for a format that the pool cannot hold yet.
    """
    try:
        return POOL_DTYPES[fmt.name]
    except KeyError:
        raise ConfigError(
            f"KV format {fmt.name!r} is not supported for the pool yet: choose {', '.join(POOL_DTYPES)}"
        ) from None
