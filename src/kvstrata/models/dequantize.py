"""From stored bytes to float32, in pieces that stay in the cache.

The arithmetic of the block formats is `gguf.quants`; here is only the traffic. One call of it over a whole
tensor makes a dozen temporaries of the tensor's size; over `CHUNK_ELEMENTS` they stay in the second-level
cache, which is three times as fast. Threads do not pay: most of the time is Python between short operations.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks

from kvstrata.errors import ModelError

FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
CHUNK_ELEMENTS = 1 << 16  # 256 KiB of float32; a multiple of every block size


def check_format(name: str, file_format: str, where: str) -> None:
    """Raise ModelError if a tensor's format is none of `FORMATS`. where: the file, for the message."""
    if file_format not in FORMATS:
        raise ModelError(
            f"{where}: tensor {name!r} has format {file_format}, which is not supported; "
            f"supported are {', '.join(FORMATS)}"
        )


def dequantize(data: np.ndarray, file_format: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Stored bytes as a new float32 tensor of `shape`. data: uint8, whole blocks, in row-major order."""
    out = torch.empty(shape, dtype=torch.float32)
    flat = out.view(-1).numpy()
    stored = data.reshape(-1)
    if file_format == "F32":
        flat.view(np.uint8)[:] = stored
        return out
    kind = GGMLQuantizationType[file_format]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    chunk_bytes = CHUNK_ELEMENTS // block_elements * block_bytes
    with np.errstate(all="ignore"):  # a non-finite scale is the file's, and gives non-finite weights
        for chunk, start in enumerate(range(0, flat.size, CHUNK_ELEMENTS)):
            # one row: `gguf.quants` would split many rows into pieces far too small
            piece = stored[chunk * chunk_bytes : (chunk + 1) * chunk_bytes].reshape(1, -1)
            flat[start : start + CHUNK_ELEMENTS] = dequantize_blocks(piece, kind).reshape(-1)
    return out
