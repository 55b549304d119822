"""What a step has to multiply and to read, beside what the machine can."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kvstrata import kernels
from kvstrata.cli.bench.limits import ByteProduct, FloatProduct, ReadBandwidth, alternately
from kvstrata.engine.llm import LLM
from kvstrata.models.config import DecoderConfig
from kvstrata.models.weight_modes import PACKED, resolve
from kvstrata.models.weights import expected_shapes

_REPEATS = 15


@dataclass(frozen=True)
class Limits:
    """read: GB/s. product: 10^9 operations/s (two a product) of torch's product of `kind`."""

    read: float
    product: float
    kind: str

    @staticmethod
    def measure(weights: str) -> Limits:
        """The multiply peak is that of int8 where packed weights are multiplied, else of float32."""
        packed = resolve(weights, torch.device("cpu")) in PACKED
        memory, product = ReadBandwidth(), ByteProduct() if packed else FloatProduct()
        read, multiply = alternately((memory.run, product.run), _REPEATS)
        return Limits(memory.rate(read), product.rate(multiply), "int8" if packed else "fp32")

    def or_better(self, other: Limits) -> Limits:
        """The higher of each limit, both of the same kind of product."""
        return Limits(max(self.read, other.read), max(self.product, other.product), self.kind)

    def as_json(self) -> dict[str, Any]:
        """The limits by name."""
        return {
            "read_gb_s": self.read,
            "product_gop_s": self.product,
            "product_kind": self.kind,
            "backend": kernels.backend(),
            "threads": torch.get_num_threads(),
        }


@dataclass(frozen=True)
class Work:
    """What forward passes of a model take. layer_bytes: K and V of a token by (window, bytes)."""

    config: DecoderConfig
    weights_bytes: int
    layer_bytes: tuple[tuple[int | None, float], ...]

    @staticmethod
    def of(llm: LLM) -> Work:
        """That of a loaded model. Of an embedding that is not the head too, next to nothing is read."""
        config = llm.loaded.decoder_config
        shapes = expected_shapes(config)
        read = {name: prod(shape) for name, shape in shapes.items()}
        total = sum(read.values())
        if not config.tied_embeddings:
            del read["embed.weight"]
        layouts = [group.pool.layout for group in llm.engine.cache.groups]
        return Work(
            config,
            llm.loaded.weights_bytes * sum(read.values()) // total,
            tuple((layout.group.window, layout.payload_bytes / layout.block_size) for layout in layouts),
        )

    def operations(self, start: int, count: int) -> int:
        """Multiplications and additions for `count` tokens after `start`, logits for the last alone."""
        config = self.config
        shapes = expected_shapes(config)
        matrices = [
            prod(shape) for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2
        ]
        head = config.vocab_size * config.hidden_size
        seen = sum(
            min(position + 1, layer.window or position + 1)
            for position in range(start, start + count)
            for layer in config.layers
        )
        return 2 * (count * sum(matrices) + head) + 4 * config.num_heads * config.head_dim * seen

    def bytes_read(self, context: int, passes: int) -> float:
        """Weights once a pass; K and V of the context as far as its last token sees it, spread over passes.

        A prefill in several passes reads on average half of the context in each.
        """
        kept = sum(size * min(context, window or context) for window, size in self.layer_bytes)
        return passes * self.weights_bytes + kept * (passes + 1) / 2


@dataclass(frozen=True)
class Spent:
    """Best seconds of a prefill of `context` tokens, of a decode step after it, and the prefill's passes."""

    context: int
    prefill: float
    decode: float
    passes: int


def row(work: Work, limits: Limits, spent: Spent) -> dict[str, float]:
    """The figures of one context."""
    context, prefill, decode = spent.context, spent.prefill, spent.decode

    def share(amount: float, seconds: float, limit: float) -> float:
        return amount / seconds / 1e9 / limit

    return {
        "with_cache_ms": 1e3 * decode,
        "without_cache_ms": 1e3 * prefill,
        "ratio": prefill / decode,
        "prefill_tok_s": context / prefill,
        "decode_tok_s": 1 / decode,
        "prefill_product_share": share(work.operations(0, context), prefill, limits.product),
        "prefill_bandwidth_share": share(work.bytes_read(context, spent.passes), prefill, limits.read),
        "decode_product_share": share(work.operations(context, 1), decode, limits.product),
        "decode_bandwidth_share": share(work.bytes_read(context, 1), decode, limits.read),
    }
