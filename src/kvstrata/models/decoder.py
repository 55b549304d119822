"""One config-driven causal decoder over a paged KV pool.

In each layer K and V are written to the pool first, in the pool's format, and attention reads only the pool:
what is attended is what is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvstrata import kernels
from kvstrata.models.batch import ForwardBatch
from kvstrata.models.config import DecoderConfig, RopeConfig
from kvstrata.models.decoder_weights import DecoderWeights, LayerWeights
from kvstrata.models.rope import RopeTable
from kvstrata.models.weights import WeightSource

_rms_norm: Final = torch.ops.kvstrata.rms_norm.default
_gated_activation: Final = torch.ops.kvstrata.gated_activation.default
_rope: Final = torch.ops.kvstrata.rope.default
_write_kv: Final = torch.ops.kvstrata.write_kv.default

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Placement:
    """Where a layer's K and V live: its group, and its index among the group's layers."""

    group: int
    index: int


@dataclass(frozen=True)
class _GroupStep:
    """What the layers of a group share in one step."""

    kv: Tensor
    slots: Tensor
    attention: kernels.Attention


def placements(config: DecoderConfig) -> tuple[Placement, ...]:
    """Each layer's group and index in it, in layer order."""
    by_layer = {
        layer: Placement(group, index)
        for group, (_, layers) in enumerate(config.layer_groups())
        for index, layer in enumerate(layers)
    }
    return tuple(by_layer[layer] for layer in range(config.num_layers))


class Decoder:
    """A loaded model. Holds no state of any sequence: that is all in the pool that a batch brings along."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.device = weights.embedding.device
        self._weights = weights
        self._placements = placements(config)
        self._windows = tuple(window or 0 for window, _ in config.layer_groups())
        self._ropes = {
            rope: RopeTable(rope, config.head_dim, self.device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }

    @classmethod
    def load(
        cls,
        source: WeightSource,
        *,
        weights: str = "fp32",
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """Read all weights of `source` into `device` memory, one copy.

        weights: `fp32`, or `bf16` (half the memory; products round their inputs to bfloat16). progress is
        called with the tensors read so far and their total, from the loading threads, one call at a time.
        Raises ConfigError on another `weights`, ModelError where a tensor is missing, damaged or of another
        shape than the configuration says.
        """
        return cls(source.config, DecoderWeights.load(source, weights, device, progress))

    def weights_nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return self._weights.nbytes()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one step: writes its tokens' K and V to the pool and returns logits.

        Returns float32 `[num_logits, vocab_size]`, an inference tensor, in the order of `batch.logit_rows`.
        Raises ValueError where parts of the batch do not fit together.
        """
        config = self.config
        if len(batch.groups) != len(self._windows):
            raise ValueError(f"batch.groups has {len(batch.groups)} entries, expected {len(self._windows)}")
        if len(batch.token_ids) == 0:
            return torch.empty((0, config.vocab_size), dtype=torch.float32, device=self.device)
        hidden = F.embedding(batch.token_ids, self._weights.embedding).float()
        if config.embedding_scale != 1.0:
            hidden = hidden * config.embedding_scale
        steps = self._group_steps(batch)
        end = int(batch.positions.max()) + 1
        rotations: dict[RopeConfig, Rotation] = {
            rope: table.at(batch.positions, end) for rope, table in self._ropes.items()
        }
        for index, layer in enumerate(self._weights.layers):
            place = self._placements[index]
            rotation = rotations[config.layers[index].rope]
            hidden = hidden + self._attention_block(layer, hidden, steps[place.group], place.index, rotation)
            hidden = hidden + self._mlp_block(layer, hidden)
        wanted = hidden.index_select(0, batch.logit_rows)
        return self._weights.head(_rms_norm(wanted, self._weights.final_norm, config.norm_eps))

    def _group_steps(self, batch: ForwardBatch) -> list[_GroupStep]:
        return [
            _GroupStep(
                group.kv,
                group.slots,
                kernels.prepare_attention(
                    group.kv, group.block_tables, batch.query_starts, batch.context_lens, window
                ),
            )
            for group, window in zip(batch.groups, self._windows, strict=True)
        ]

    def _attention_block(
        self, layer: LayerWeights, hidden: Tensor, step: _GroupStep, index: int, rotation: Rotation
    ) -> Tensor:
        config = self.config
        qkv = layer.qkv(_rms_norm(hidden, layer.attn_norm, config.norm_eps))
        heads = qkv.view(len(qkv), -1, config.head_dim)
        counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = heads.split_with_sizes(counts, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = _rms_norm(query, layer.q_norm, config.norm_eps)
            key = _rms_norm(key, layer.k_norm, config.norm_eps)
        query, key = _rope(query, *rotation), _rope(key, *rotation)
        _write_kv(step.kv, index, key, value, step.slots)
        attended = step.attention.attend(query, step.kv, index, config.attention_scale)
        out = layer.o(attended.flatten(1))
        if layer.post_attn_norm is not None:
            out = _rms_norm(out, layer.post_attn_norm, config.norm_eps)
        return out

    def _mlp_block(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        config = self.config
        gate_up = layer.gate_up(_rms_norm(hidden, layer.mlp_norm, config.norm_eps))
        gate, up = gate_up.chunk(2, dim=-1)
        out = layer.down(_gated_activation(gate, up, config.activation))
        if layer.post_mlp_norm is not None:
            out = _rms_norm(out, layer.post_mlp_norm, config.norm_eps)
        return out
