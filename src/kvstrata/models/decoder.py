"""One config-driven causal decoder over a paged KV pool.

In each layer K and V are written to the pool first, in the pool's format, and attention reads only the pool:
what is attended is what is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvstrata import kernels
from kvstrata.errors import ConfigError
from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.config import DecoderConfig, RopeConfig
from kvstrata.models.decoder_weights import DecoderWeights, LayerWeights
from kvstrata.models.rope import RopeTable, Rotation
from kvstrata.models.stack import Stack
from kvstrata.models.weights import WeightSource

_rope: Final = torch.ops.kvstrata.rope.default
_rms_norm: Final = torch.ops.kvstrata.rms_norm.default
_add_rms_norm: Final = torch.ops.kvstrata.add_rms_norm.default
_gated_activation: Final = torch.ops.kvstrata.fused_gated_activation.default
_rope_write_kv: Final = torch.ops.kvstrata.rope_write_kv.default


Rotations = dict[RopeConfig, Rotation]


@dataclass(frozen=True)
class Placement:
    """Where a layer's K and V live: its group, and its index among the group's layers."""

    group: int
    index: int


@dataclass(frozen=True)
class _Scene:
    """What a step's layers have in common, by group and by kind of RoPE."""

    groups: tuple[GroupBatch, ...]
    attentions: tuple[kernels.Attention, ...]
    rotations: Rotations
    sink_rotations: Rotations


def placements(config: DecoderConfig, apart: Set[int] = frozenset()) -> tuple[Placement, ...]:
    """Each layer's group and index in it, in layer order; apart: see `DecoderConfig.layer_groups`."""
    by_layer = {
        layer: Placement(group, index)
        for group, (_, layers) in enumerate(config.layer_groups(apart))
        for index, layer in enumerate(layers)
    }
    return tuple(by_layer[layer] for layer in range(config.num_layers))


class Decoder:
    """A loaded model. Holds no state of any sequence: that is all in the pool that a batch brings along.

    apart: layers whose K and V are in groups of their own, see `DecoderConfig.layer_groups`. depth: layers to
    run, the first ones (None: all).
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        apart: Set[int] = frozenset(),
        depth: int | None = None,
    ) -> None:
        self.config = config
        self.device = weights.final_norm.device
        self._weights = weights
        self._apart = apart
        self._depth = config.num_layers if depth is None else depth
        self._placements = placements(config, apart)
        self.groups = config.layer_groups(apart)
        self._windows = tuple(window or 0 for window, _ in self.groups)
        self._key_offsets: list[Tensor | None] = [None] * config.num_layers
        self._ropes = {
            rope: RopeTable(rope, config.head_dim, self.device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }
        kinds = {rope: kind for kind, rope in enumerate(self._ropes)}
        self._stack = Stack.build(
            config,
            weights,
            [
                (place.group, place.index, kinds[layer.rope])
                for place, layer in zip(self._placements[: self._depth], config.layers, strict=False)
            ],
            self._windows,
        )

    @classmethod
    def load(
        cls,
        source: WeightSource,
        *,
        weights: str = "auto",
        device: torch.device,
        apart: Set[int] = frozenset(),
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """Read all weights of `source` into `device` memory, one copy.

        weights: `auto` keeps the file's bits (float32 where there are no kernels for them), `int8`, `int4`,
        `bf16` (products round their inputs to bfloat16), `fp32`. progress is
        called with the tensors read so far and their total, from the loading threads, one call at a time.
        Raises ConfigError on another `weights`, ModelError where a tensor is missing, damaged or of another
        shape than the configuration says.
        """
        return cls(source.config, DecoderWeights.load(source, weights, device, progress), apart)

    def rotation(self, layer: int, positions: Tensor) -> Rotation:
        """Cosines and sines of a layer's RoPE, float32 `[num_positions, head_dim / 2]` each."""
        return self._ropes[self.config.layers[layer].rope].at(positions, int(positions.max()) + 1)

    def offset_keys(self, offsets: Mapping[int, Tensor]) -> None:
        """From now on take a vector, float32 `[num_kv_heads, head_dim]`, off all keys of a layer."""
        for layer, offset in offsets.items():
            self._key_offsets[layer] = offset
            if self._stack is not None and layer < self._depth:
                self._stack.offset_keys(layer, offset)

    def first_layers(self, count: int) -> Decoder:
        """The first layers with the head, over the same weights and the same pool.

        What they write there are the K and V that the whole model writes. Raises ConfigError where there are
        not so many layers.
        """
        if not 1 <= count <= self.config.num_layers:
            raise ConfigError(
                f"draft is 'layers:{count}'; the model has {self.config.num_layers} layers: give no more"
            )
        first = Decoder(self.config, self._weights, self._apart, count)
        first.offset_keys(
            {layer: offset for layer, offset in enumerate(self._key_offsets) if offset is not None}
        )
        return first

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
        hidden = self._weights.embedding(batch.token_ids)
        if config.embedding_scale != 1.0:
            hidden.mul_(config.embedding_scale)
        rotations, sink_rotations = self._rotations(batch)
        if self._stack is not None:
            sinks = [sink_rotations.get(rope) for rope in self._ropes] if sink_rotations else []
            return self._stack.forward(hidden, batch, list(rotations.values()), sinks)
        scene = self._scene(batch, rotations, sink_rotations)
        layers = self._weights.layers[: self._depth]
        normed = _rms_norm(hidden, layers[0].attn_norm, config.norm_eps)
        for index, layer in enumerate(layers):
            attended = self._attend(index, layer, normed, scene)
            last = index + 1 == len(layers)
            if last:  # from here on nothing is written to the pool: only the wanted rows go on
                attended = attended.index_select(0, batch.logit_rows)
                hidden = hidden.index_select(0, batch.logit_rows)
            out = self._normed(layer.o(attended), layer.post_attn_norm)
            normed = _add_rms_norm(hidden, out, layer.mlp_norm, config.norm_eps)
            out = layer.down(_gated_activation(layer.gate_up(normed), config.activation))
            out = self._normed(out, layer.post_mlp_norm)
            following = self._weights.final_norm if last else layers[index + 1].attn_norm
            normed = _add_rms_norm(hidden, out, following, config.norm_eps)
        return self._weights.head(normed)

    def _rotations(self, batch: ForwardBatch) -> tuple[Rotations, Rotations]:
        """By kind of RoPE: those of all tokens, and of the queries that meet sinks, if there are any."""
        end = int(batch.positions.max()) + 1
        rotations = {rope: table.at(batch.positions, end) for rope, table in self._ropes.items()}
        sinks = None if batch.retained is None else batch.retained.sink_positions
        if sinks is None:
            return rotations, {}
        full = dict.fromkeys(layer.rope for layer in self.config.layers if layer.window is None)
        return rotations, {rope: self._ropes[rope].at(sinks, end) for rope in full}

    def _scene(self, batch: ForwardBatch, rotations: Rotations, sink_rotations: Rotations) -> _Scene:
        retained = batch.retained
        seen = (None, None) if retained is None else (retained.windows, retained.sinks)
        return _Scene(
            groups=batch.groups,
            attentions=tuple(
                kernels.prepare_attention(
                    group.kv,
                    group.block_tables,
                    batch.query_starts,
                    batch.context_lens,
                    window,
                    group.scales,
                    *((None, None) if window else seen),  # a layer's own window stays
                )
                for group, window in zip(batch.groups, self._windows, strict=True)
            ),
            rotations=rotations,
            sink_rotations=sink_rotations,
        )

    def _attend(self, index: int, layer: LayerWeights, normed: Tensor, scene: _Scene) -> Tensor:
        """Write the layer's K and V, then attend; float32 `[num_tokens, num_heads * head_dim]`."""
        config, place = self.config, self._placements[index]
        group, kind = scene.groups[place.group], config.layers[index]
        projected = layer.qkv(normed)
        query = _rope_write_kv(
            projected,
            layer.q_norm,
            layer.k_norm,
            config.norm_eps,
            *scene.rotations[kind.rope],
            None,
            group.slots,
            group.kv,
            place.index,
            group.scales,
            self._key_offsets[index],
        )
        sink_query = None
        if scene.sink_rotations and kind.window is None:
            sink_query = self._sink_query(projected, layer.q_norm, scene.sink_rotations[kind.rope])
        attention = scene.attentions[place.group]
        attended = attention.attend(
            query,
            group.kv,
            place.index,
            config.attention_scale,
            sink_query,
            key_offset=self._key_offsets[index],
        )
        return attended.flatten(1)

    def _sink_query(self, projected: Tensor, norm: Tensor | None, rotation: Rotation) -> Tensor:
        """The queries once more, rotated to where the sinks stay within reach."""
        config = self.config
        query = projected[:, : config.num_heads * config.head_dim]
        query = query.view(len(projected), config.num_heads, config.head_dim)
        if norm is not None:
            query = _rms_norm(query, norm, config.norm_eps)
        rotated: Tensor = _rope(query, *rotation)
        return rotated

    def _normed(self, out: Tensor, weight: Tensor | None) -> Tensor:
        """The norm that some models put behind a block."""
        if weight is None:
            return out
        normed: Tensor = _rms_norm(out, weight, self.config.norm_eps)
        return normed
