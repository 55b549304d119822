"""The decoder's layers at one native go, where all products are packed and the kernels are native.

A step of decode is hundreds of short operators; calling them one by one from Python, and waking threads for
each, takes as long as a third of the work. Here one call goes through all layers and the head with the same
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvstrata.kernels import backend
from kvstrata.models.batch import ForwardBatch
from kvstrata.models.config import DecoderConfig
from kvstrata.models.decoder_weights import DecoderWeights
from kvstrata.models.linear import Linear, PackedLinear
from kvstrata.models.rope import Rotation

Place = tuple[int, int, int]  # of a layer: its group, its index in the group, and its kind of RoPE


class Stack:
    """Runs the first layers and the head of a decoder."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @classmethod
    def build(
        cls, config: DecoderConfig, weights: DecoderWeights, places: Sequence[Place], windows: Sequence[int]
    ) -> Stack | None:
        """places: of the layers to run; windows: of the layer groups, 0 for none.

        None where some product is dense or there are no native kernels.
        """
        layers = weights.layers[: len(places)]
        products = [p for layer in layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        packed = all(isinstance(product, PackedLinear) for product in (*products, weights.head))
        if not packed or backend() == "reference" or weights.final_norm.device.type != "cpu":
            return None
        native = torch.classes.kvstrata.DecoderStack(
            config.norm_eps,
            config.attention_scale,
            config.activation,
            list(windows),
            weights.final_norm,
            *_packed(weights.head),
        )
        for layer, place in zip(layers, places, strict=True):
            (qkv, qkv_bias), (o, o_bias) = _packed(layer.qkv), _packed(layer.o)
            (gate_up, gate_up_bias), (down, down_bias) = _packed(layer.gate_up), _packed(layer.down)
            norms = [layer.attn_norm, layer.q_norm, layer.k_norm, layer.post_attn_norm, layer.mlp_norm]
            native.add_layer(
                [*norms, layer.post_mlp_norm],
                qkv,
                o,
                gate_up,
                down,
                [qkv_bias, o_bias, gate_up_bias, down_bias],
                list(place),
            )
        return cls(native)

    def offset_keys(self, layer: int, offset: Tensor) -> None:
        """From now on take a vector, float32 `[num_kv_heads, head_dim]`, off all keys of a layer."""
        self._native.offset_keys(layer, offset)

    def forward(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        rotations: Sequence[Rotation],
        sink_rotations: Sequence[Rotation | None],
    ) -> Tensor:
        """From embedded tokens, float32 `[num_tokens, hidden_size]`, which are used up, to the wanted logits.

        rotations: by kind of RoPE, as sink_rotations, which are empty where no token hides others behind
        sinks. Returns float32 `[num_logits, vocab_size]`. Raises ValueError where parts do not fit together.
        """
        retained = batch.retained
        logits: Tensor = self._native.run(
            hidden,
            batch.logit_rows,
            batch.query_starts,
            batch.context_lens,
            [group.kv for group in batch.groups],
            [group.block_tables for group in batch.groups],
            [group.slots for group in batch.groups],
            [group.scales for group in batch.groups],
            [cos for cos, _ in rotations],
            [sin for _, sin in rotations],
            None if retained is None else retained.windows,
            None if retained is None else retained.sinks,
            [None if rotation is None else rotation[0] for rotation in sink_rotations],
            [None if rotation is None else rotation[1] for rotation in sink_rotations],
        )
        return logits


def _packed(product: Linear) -> tuple[list[Tensor], Tensor | None]:
    assert isinstance(product, PackedLinear)
    return [weight.data for weight in product.weights], product.bias
