"""The decoder's weights in memory, loaded from a `WeightSource` by several threads.

Projections that share an input (q, k and v; gate and up) are laid end to end and multiplied as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.models.config import DecoderConfig
from kvstrata.models.linear import Embedding, Linear
from kvstrata.models.weight_loader import DenseLoader, Loader, PackedLoader, Progress
from kvstrata.models.weight_modes import DENSE, PACKED, resolve
from kvstrata.models.weights import WeightSource


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
    """All weights. tied: the head multiplies with the embedding's table, which is in memory once."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    tied: bool

    @staticmethod
    def load(
        source: WeightSource, weights: str, device: torch.device, progress: Progress | None = None
    ) -> DecoderWeights:
        """Read every tensor; see `Decoder.load`."""
        mode = resolve(weights, device)
        loader: Loader
        if mode in PACKED:
            loader = PackedLoader(source, device, PACKED[mode])
        else:
            loader = DenseLoader(source, device, DENSE[mode])
        result = _compose(source.config, loader)
        loader.run(progress)
        return result

    def nbytes(self) -> int:
        """Bytes of all weights in memory; a tied head counts once."""
        head = 0 if self.tied else self.head.nbytes()
        layers = sum(layer.nbytes() for layer in self.layers)
        return self.embedding.nbytes() + layers + self.final_norm.nbytes + head


def _compose(config: DecoderConfig, loader: Loader) -> DecoderWeights:
    """The structure of a decoder, its tensors still to be filled by `loader.run`."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    # First, since it is the largest: threads then share out what is left evenly.
    embedding, head = loader.embedding(config.vocab_size, hidden, tied=config.tied_embeddings)

    def layer(index: int) -> LayerWeights:
        at = f"layers.{index}."

        def linear(names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool) -> Linear:
            paths = [at + name for name in names]
            return loader.linear(paths, sizes, inputs, bias=bias)

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

    layers = tuple(layer(index) for index in range(config.num_layers))
    final_norm = loader.norm("final_norm", hidden)
    return DecoderWeights(embedding, layers, final_norm, head, config.tied_embeddings)
