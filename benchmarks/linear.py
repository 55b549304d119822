"""Products with packed weights: rate by format and rows, beside what the machine could do.

Usage: python benchmarks/linear.py [--formats Q4_1,Q8_0] [--rows 1,4,32,512] [--layers 30] [--json]

The weights are a decoder's (hidden size 576, or 768 for formats in blocks of 256): one call each for q, k and
v, o, gate and up, down, layer after layer, more than most caches hold; then four heads on one row. Bandwidth
is what torch's sum reads of 512 MiB in the same run. The best of some repetitions counts.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from kvstrata.kernels import backend
from kvstrata.kernels.packing import PackedLinear, PackedWeight, pack

INTERMEDIATE = 1536
VOCABULARY = 49152
HALF_ONE_128TH = (0x00, 0x20)  # fp16 2^-7, a scale that keeps random weights finite
SCALES_AT = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--formats", default="Q4_1,Q8_0,Q4_0,Q4_K,Q6_K")
    parser.add_argument("--rows", default="1,2,4,8,32,512")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    result: dict[str, Any] = {
        "backend": backend(),
        "threads": torch.get_num_threads(),
        "read_gb_s": round(bandwidth, 1),
    }
    for kind in arguments.formats.split(","):
        rows = [int(count) for count in arguments.rows.split(",")]
        result |= measure(kind, rows, arguments.layers, bandwidth)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(name, value if not isinstance(value, dict) else "  ".join(f"{k} {v}" for k, v in value.items()))


def measure(kind: str, rows: list[int], layers: int, bandwidth: float) -> dict[str, dict[str, float]]:
    """Figures by rows for one format: layers alone, and the head on one row."""
    hidden = 768 if kind.endswith("_K") else 576
    key = hidden // 3
    shapes = ((hidden, key, key), (hidden,), (INTERMEDIATE, INTERMEDIATE), (hidden,))
    inputs = (hidden, hidden, hidden, INTERMEDIATE)
    model = [
        PackedLinear(tuple(random_weight(kind, outputs, size) for outputs in group))
        for _ in range(layers)
        for group, size in zip(shapes, inputs, strict=True)
    ]
    nbytes = sum(linear.nbytes() for linear in model)
    products = layers * sum(sum(group) * size for group, size in zip(shapes, inputs, strict=True))
    result = {}
    for count in rows:
        x = {size: torch.randn(count, size) for size in (hidden, INTERMEDIATE)}
        steps = [(linear, x[linear.weights[0].in_features]) for linear in model]
        seconds = best(lambda steps=steps: [linear(value) for linear, value in steps])
        result[f"{kind} x {count}"] = figures(seconds, count, nbytes, products * count, bandwidth)
    heads = [PackedLinear((random_weight(kind, VOCABULARY, hidden),)) for _ in range(4)]
    last = torch.randn(1, hidden)
    seconds = best(lambda: [head(last) for head in heads]) / len(heads)
    result[f"{kind} head"] = figures(seconds, 1, heads[0].nbytes(), VOCABULARY * hidden, bandwidth)
    return result


def figures(seconds: float, count: int, nbytes: int, products: int, bandwidth: float) -> dict[str, float]:
    rate = nbytes / seconds / 1e9
    return {
        "ms": round(seconds * 1e3, 2),
        "tok_s": round(count / seconds),
        "gb_s": round(rate, 1),
        "bandwidth_share": round(rate / bandwidth, 2),
        "gmac_s": round(products / seconds / 1e9, 1),
    }


def random_weight(kind: str, outputs: int, inputs: int) -> PackedWeight:
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(0).integers(
        0, 256, (outputs, inputs // block_inputs, block_bytes), dtype=np.uint8
    )
    for offset in SCALES_AT.get(kind, (0,)):
        blocks[:, :, offset : offset + 2] = HALF_ONE_128TH
    return pack(kind, (outputs, inputs), blocks.reshape(outputs, -1))


def read_bandwidth() -> float:
    """GB/s that torch's sum reads from memory."""
    memory = torch.ones(1 << 27)
    return memory.nbytes / best(memory.sum) / 1e9


def best(run: Callable[[], Any], repetitions: int = 7) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
