"""The keys of a run of blocks, each hashed after the one before it."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt

_WORTH_A_CALL = 24  # blocks from which on one call of the operator is quicker than hashlib's calls


def chained_keys(
    parent: bytes, rows: npt.NDArray[np.uint8], contents: list[bytes], key_bytes: int
) -> list[bytes]:
    """Of each block the first `key_bytes` of SHA-256 over the key before it, first `parent`, and its content.

    rows, contents: the blocks' contents twice, as `[num_blocks, content bytes]` and apart.
    """
    if len(contents) >= _WORTH_A_CALL:
        # Tiers and tools that import keys do without torch; whoever chains a prompt has it.
        from kvstrata import kernels  # noqa: PLC0415

        if kernels.backend() != "reference":
            return split_rows(kernels.chain_keys(parent, rows, key_bytes))
    key, keys = parent, []
    fresh = sha256().copy  # half the time of a new sha256() for each block
    for content in contents:
        digest = fresh()
        digest.update(key + content)
        key = digest.digest()[:key_bytes]
        keys.append(key)
    return keys


def split_rows(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    """The bytes of each row, in a third of the time that slices take; rows: contiguous."""
    apart: list[bytes] = rows.view(f"V{rows.shape[1]}").ravel().tolist()
    return apart
