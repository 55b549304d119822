"""What `kvstrata bench linear` measures: a decoder's products, packed as a GGUF file has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from kvstrata import kernels
from kvstrata.cli.bench.limits import ReadBandwidth, alternately
from kvstrata.kernels.memory import Shelf
from kvstrata.kernels.packing import PackedWeight, pack
from kvstrata.models.linear import PackedLinear

FORMATS: Final = ("Q4_1", "Q8_0", "Q4_0", "Q4_K", "Q6_K")

_INTERMEDIATE: Final = 1536
_HALF_2_TO_MINUS_7: Final = (0x00, 0x20)  # a float16 scale that keeps random weights finite
_SCALES_AT: Final = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
_HEADS: Final = 4  # one head alone would stay in the cache


@dataclass(frozen=True)
class Sizes:
    """How much is multiplied: layers, outputs of the head, and runs of which the best counts."""

    layers: int
    vocabulary: int
    repeats: int


def measure(formats: Sequence[str], rows: Sequence[int], sizes: Sizes) -> dict[str, Any]:
    """Figures by `FORMAT x ROWS`, and of the head on one row by `FORMAT head`."""
    memory = ReadBandwidth()
    figures: dict[str, Any] = {"backend": kernels.backend(), "threads": torch.get_num_threads()}
    for kind in formats:
        figures |= _layers(kind, rows, sizes, memory)
        if sizes.vocabulary:
            figures |= _head(kind, sizes, memory)
    return figures


def _layers(kind: str, rows: Sequence[int], sizes: Sizes, memory: ReadBandwidth) -> dict[str, Any]:
    """One call each for q, k and v, for o, for gate and up, for down; layer after layer."""
    hidden = _hidden(kind)
    groups = ((hidden, hidden // 3, hidden // 3), (hidden,), (_INTERMEDIATE, _INTERMEDIATE), (hidden,))
    inputs = (hidden, hidden, hidden, _INTERMEDIATE)
    shelf = Shelf()
    model = [
        PackedLinear(tuple(random_weight(kind, outputs, size, shelf) for outputs in group))
        for _ in range(sizes.layers)
        for group, size in zip(groups, inputs, strict=True)
    ]
    nbytes = sum(linear.nbytes() for linear in model)
    products = sizes.layers * sum(sum(group) * size for group, size in zip(groups, inputs, strict=True))
    result = {}
    for count in rows:
        x = {size: torch.randn(count, size) for size in (hidden, _INTERMEDIATE)}
        steps = [(linear, x[linear.weights[0].in_features]) for linear in model]

        def run(steps: Sequence[tuple[PackedLinear, torch.Tensor]] = steps) -> None:
            for linear, value in steps:
                linear(value)

        seconds, limit = alternately((run, memory.run), sizes.repeats)
        result[f"{kind} x {count}"] = _row(seconds, count, nbytes, products * count, memory.rate(limit))
    return result


def _head(kind: str, sizes: Sizes, memory: ReadBandwidth) -> dict[str, Any]:
    hidden = _hidden(kind)
    shelf = Shelf()
    heads = [PackedLinear((random_weight(kind, sizes.vocabulary, hidden, shelf),)) for _ in range(_HEADS)]
    last = torch.randn(1, hidden)

    def run() -> None:
        for head in heads:
            head(last)

    seconds, limit = alternately((run, memory.run), sizes.repeats)
    products = sizes.vocabulary * hidden
    return {f"{kind} head": _row(seconds / _HEADS, 1, heads[0].nbytes(), products, memory.rate(limit))}


def _hidden(kind: str) -> int:
    return 768 if kind.endswith("_K") else 576  # formats in blocks of 256 need a multiple of that


def _row(seconds: float, count: int, nbytes: int, products: int, bandwidth: float) -> dict[str, float]:
    rate = nbytes / seconds / 1e9
    return {
        "ms": seconds * 1e3,
        "tok_s": count / seconds,
        "gb_s": rate,
        "bandwidth_share": rate / bandwidth,
        "gflop_s": 2 * products / seconds / 1e9,
    }


def random_weight(kind: str, outputs: int, inputs: int, shelf: Shelf) -> PackedWeight:
    """Random blocks of a GGML format, packed and put where a loaded model's weights are."""
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (outputs, inputs // block_inputs, block_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for offset in _SCALES_AT.get(kind, (0,)):
        blocks[:, :, offset : offset + 2] = _HALF_2_TO_MINUS_7
    packed = pack(kind, (outputs, inputs), blocks.reshape(outputs, -1))
    return replace(packed, data=shelf.put(packed.data))
