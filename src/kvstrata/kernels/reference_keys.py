"""Chained block keys over `hashlib`: the specification of `csrc/keys`, bit for bit."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import torch
from torch import Tensor

from kvstrata.kernels.checks import expect_contiguous, expect_dtype, expect_shape

DIGEST_BYTES: Final = 32


def chain_keys(parent: Tensor, contents: Tensor, key_bytes: int) -> Tensor:
    """Each block's key: the first bytes of SHA-256 (FIPS 180-4) over the key before it and its content.

    parent: uint8 `[parent_bytes]`, the key before the first; contents: uint8 `[num_blocks, content_bytes]`;
    both contiguous. Returns uint8 `[num_blocks, key_bytes]`.

    Raises ValueError for other shapes, dtypes or strides, and unless key_bytes is 1 to 32.
    """
    expect_dtype("chain_keys", "parent", parent, torch.uint8)
    expect_shape("chain_keys", "parent", parent, ("parent_bytes",))
    expect_contiguous("chain_keys", "parent", parent)
    expect_dtype("chain_keys", "contents", contents, torch.uint8)
    expect_shape("chain_keys", "contents", contents, ("num_blocks", "content_bytes"))
    expect_contiguous("chain_keys", "contents", contents)
    if not 1 <= key_bytes <= DIGEST_BYTES:
        raise ValueError(f"chain_keys: key_bytes is {key_bytes}, expected 1 to {DIGEST_BYTES}")
    key, keys = bytes(parent.tolist()), bytearray()
    for content in contents.tolist():
        key = sha256(key + bytes(content)).digest()[:key_bytes]
        keys += key
    flat = torch.tensor(list(keys), dtype=torch.uint8, device=contents.device)
    return flat.view(len(contents), key_bytes)


OPERATORS: Final = (chain_keys,)
