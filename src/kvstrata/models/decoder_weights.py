"""The decoder's weights in memory, loaded from a `WeightSource` by several threads.

Projections that share an input (q, k and v; gate and up) are laid end to end and multiplied as one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstrata.errors import ConfigError, ModelError
from kvstrata.models.config import DecoderConfig
from kvstrata.models.dequantize import dequantize
from kvstrata.models.linear import DenseLinear, Linear
from kvstrata.models.weights import RawTensor, WeightSource

Progress = Callable[[int, int], None]

# Dequantising is a third Python, which only one thread runs at a time.
_MAX_THREADS = 4
# Elements dequantised before they are copied: the detour stays small beside the largest tensor.
_PIECE = 1 << 20

WEIGHT_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms are float32 vectors, None where the model has none."""

    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None

    def nbytes(self) -> int:
        """Bytes of all weights of the layer."""
        norms = (
            self.attn_norm,
            self.q_norm,
            self.k_norm,
            self.post_attn_norm,
            self.mlp_norm,
            self.post_mlp_norm,
        )
        products = (self.qkv, self.o, self.gate_up, self.down)
        return sum(norm.nbytes for norm in norms if norm is not None) + sum(p.nbytes() for p in products)


@dataclass(frozen=True)
class DecoderWeights:
    """All weights. embedding: `[vocab_size, hidden_size]`, also the head's where the model ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    tied: bool

    @staticmethod
    def load(
        source: WeightSource, weights: str, device: torch.device, progress: Progress | None = None
    ) -> DecoderWeights:
        """Read every tensor; see `Decoder.load`."""
        if weights not in WEIGHT_DTYPES:
            known = ", ".join(WEIGHT_DTYPES)
            raise ConfigError(f"weights is {weights!r}, expected one of {known}")
        loader = _Loader(source, WEIGHT_DTYPES[weights], device)
        result = _compose(source.config, loader)
        loader.run(progress)
        return result

    def nbytes(self) -> int:
        """Bytes of all weights in memory; a tied head counts once."""
        head = 0 if self.tied else self.head.nbytes()
        layers = sum(layer.nbytes() for layer in self.layers)
        return self.embedding.nbytes + layers + self.final_norm.nbytes + head


def _compose(config: DecoderConfig, loader: _Loader) -> DecoderWeights:
    """The structure of a decoder, its tensors still to be filled by `loader.run`."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    # First, since it is the largest: threads then share out what is left evenly.
    embedding = loader.matrix(("embed",), (config.vocab_size,), hidden)

    def layer(index: int) -> LayerWeights:
        at = f"layers.{index}."

        def linear(names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool) -> Linear:
            paths = [at + name for name in names]
            return DenseLinear(
                loader.matrix(paths, sizes, inputs), loader.bias(paths, sizes) if bias else None
            )

        return LayerWeights(
            attn_norm=loader.norm(at + "attn_norm", hidden),
            qkv=linear("qkv", (query, key, key), hidden, config.qkv_bias),
            q_norm=loader.norm(at + "q_norm", head_dim) if config.qk_norm else None,
            k_norm=loader.norm(at + "k_norm", head_dim) if config.qk_norm else None,
            o=linear("o", (hidden,), query, config.output_bias),
            post_attn_norm=loader.norm(at + "post_attn_norm", hidden) if config.sandwich_norms else None,
            mlp_norm=loader.norm(at + "mlp_norm", hidden),
            gate_up=linear(("gate", "up"), (inner, inner), hidden, config.mlp_bias),
            down=linear(("down",), (hidden,), inner, config.mlp_bias),
            post_mlp_norm=loader.norm(at + "post_mlp_norm", hidden) if config.sandwich_norms else None,
        )

    tied = config.tied_embeddings
    head = embedding if tied else loader.matrix(("head",), (config.vocab_size,), hidden)
    layers = tuple(layer(index) for index in range(config.num_layers))
    return DecoderWeights(embedding, layers, loader.norm("final_norm", hidden), DenseLinear(head), tied)


class _Loader:
    """Hands out unfilled tensors, then fills them all at once from several threads."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._present = frozenset(source.names())
        self._jobs: list[tuple[str, Tensor]] = []

    def matrix(self, names: Sequence[str], sizes: Sequence[int], inputs: int) -> Tensor:
        """Weights of `names` laid end to end, `[sum(sizes), inputs]`, in the weights' dtype."""
        weight = torch.empty((sum(sizes), inputs), dtype=self._dtype, device=self._device)
        self._plan([f"{name}.weight" for name in names], weight.split_with_sizes(list(sizes)))
        return weight

    def bias(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
        """Biases of `names` laid end to end, `[sum(sizes)]`, in the weights' dtype."""
        bias = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        self._plan([f"{name}.bias" for name in names], bias.split_with_sizes(list(sizes)))
        return bias

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's weights, float32 `[size]`."""
        weight = torch.empty(size, dtype=torch.float32, device=self._device)
        self._plan([f"{name}.weight"], [weight])
        return weight

    def run(self, progress: Progress | None) -> None:
        """Fill everything that was handed out."""
        lock = threading.Lock()
        done = 0

        def fill(name: str, target: Tensor) -> None:
            nonlocal done
            raw = self._source.raw(name)
            if raw.shape != tuple(target.shape):
                raise ModelError(
                    f"tensor {name} has shape {list(raw.shape)}, the configuration says "
                    f"{list(target.shape)}: the file is damaged or of another model"
                )
            _copy(raw, target)
            with lock:
                done += 1
                if progress is not None:
                    progress(done, len(self._jobs))

        with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            futures = [pool.submit(fill, name, target) for name, target in self._jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _plan(self, names: Sequence[str], targets: Sequence[Tensor]) -> None:
        for name, target in zip(names, targets, strict=True):
            if name not in self._present:
                raise ModelError(f"tensor {name} is missing: the file is incomplete or of another model")
            self._jobs.append((name, target))


def _copy(raw: RawTensor, target: Tensor) -> None:
    """Dequantise a tensor into place, a few rows at a time so that no second copy of it exists."""
    if target.dim() == 1:
        target.copy_(dequantize(raw.data, raw.format, raw.shape))
        return
    num_rows, inputs = raw.shape
    step = max(1, _PIECE // inputs)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        data = raw.data[rows] if raw.row_order is None else raw.data[raw.row_order[rows]]
        target[rows].copy_(dequantize(data, raw.format, (len(data), inputs)))
