"""Dequantising in pieces gives what the format's library gives for the whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvstrata.errors import ModelError
from kvstrata.models.dequantize import CHUNK_ELEMENTS, FORMATS, check_format, dequantize
from kvstrata.models.gguf import GGUFFile

COLUMNS = 768
ROWS = CHUNK_ELEMENTS * 2 // COLUMNS + 5  # over two whole pieces and a part
HALF_SCALES = {  # where a block's half-precision scales lie, so that random blocks have finite ones
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def stored_rows(name: str) -> np.ndarray:
    """uint8 [ROWS, bytes per row] of a format."""
    rng = np.random.default_rng(7)
    kind = GGMLQuantizationType[name]
    values = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    if name not in HALF_SCALES:
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(ROWS, -1)
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // elements, size), dtype=np.uint8)
    for offset in HALF_SCALES[name]:
        scales = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_survives_a_file_bit_for_bit(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    stored = stored_rows(name)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.zeros(3, np.float32))  # so that the next one is not at the data's start
    if name == "F32":
        writer.add_tensor("weight", stored.view(np.float32))
    elif name == "F16":
        writer.add_tensor("weight", stored.view(np.float16))
    else:
        writer.add_tensor("weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile.open(path)
    entry = file.tensors["weight"]
    assert (entry.format, entry.shape, entry.nbytes) == (name, (ROWS, COLUMNS), stored.nbytes)
    weight = dequantize(file.data("weight"), entry.format, entry.shape)
    assert weight.dtype == torch.float32
    expected = gguf.quants.dequantize(stored, kind).reshape(ROWS, COLUMNS)
    assert np.isfinite(expected).all()
    assert np.array_equal(weight.numpy(), expected)


def test_other_formats_are_named_with_those_supported() -> None:
    with pytest.raises(ModelError, match=r"m\.gguf: tensor 'w' has format IQ4_XS.*Q4_K"):
        check_format("w", "IQ4_XS", "m.gguf")
