"""What the keys of a layer have in common: taken off before they are quantised.

A softmax over keys does not change when the same vector is taken off all of them, so nothing is added back
where they are read, and codes are spent on what differs. It is measured once a model, over tokens that are
always the same: their mean key before RoPE, which hardly depends on them, turned to all positions of a long
context and averaged again, since what turns quickly has no mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.decoder import Decoder, Rotation

_TOKENS = 256
_CONTEXT = 4096
_BLOCK = 16
_STRIDE = 2654435761  # 2^32 over the golden ratio: spreads ids over any vocabulary
_rope = torch.ops.kvstrata.rope.default


def measure_key_offsets(decoder: Decoder, layers: Iterable[int]) -> dict[int, Tensor]:
    """The mean key of each of `layers`, float32 `[num_kv_heads, head_dim]`.

    Rounded to a 32nd of the layer's largest, so that arithmetic that differs in its last bits gives the same.
    The decoder must have no offsets yet.
    """
    wanted = tuple(layers)
    if not wanted:
        return {}
    keys = _keys(decoder)
    slots = torch.arange(_TOKENS, device=decoder.device)
    context = torch.arange(_CONTEXT, device=decoder.device)
    return {
        layer: _rounded(
            _mean_at(keys[layer], decoder.rotation(layer, slots), decoder.rotation(layer, context))
        )
        for layer in wanted
    }


def _keys(decoder: Decoder) -> dict[int, Tensor]:
    """Each layer's keys of the tokens, after RoPE, float32 `[num_tokens, num_kv_heads, head_dim]`."""
    config, device = decoder.config, decoder.device
    blocks = _TOKENS // _BLOCK
    slots = torch.arange(_TOKENS, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    shape = (2, config.num_kv_heads, _BLOCK, config.head_dim)
    pools = [
        torch.zeros((blocks, len(layers), *shape), dtype=torch.float32, device=device)
        for _, layers in decoder.groups
    ]
    decoder.forward(
        ForwardBatch(
            token_ids=(slots + 1) * _STRIDE % config.vocab_size,
            positions=slots,
            query_starts=torch.tensor([0, _TOKENS], dtype=torch.int32, device=device),
            context_lens=torch.tensor([_TOKENS], dtype=torch.int32, device=device),
            logit_rows=slots[-1:],
            groups=tuple(GroupBatch(pool, table, slots) for pool in pools),
        )
    )
    return {
        layer: pool[:, index, 0].transpose(1, 2).flatten(0, 1)
        for pool, (_, layers) in zip(pools, decoder.groups, strict=True)
        for index, layer in enumerate(layers)
    }


def _mean_at(keys: Tensor, own: Rotation, context: Rotation) -> Tensor:
    """The mean of keys, turned back from their own positions and on to all of `context`."""
    cos, sin = own
    stretch = (cos.square() + sin.square())[0, 0]  # of a RoPE that scales besides; else 1
    plain = _rope(keys.contiguous(), cos, -sin).double().mean(dim=0, keepdim=True) / stretch
    mean: Tensor = _rope(
        plain.float(), *(part.double().mean(dim=0, keepdim=True).float() for part in context)
    )
    return mean[0].double()


def _rounded(mean: Tensor) -> Tensor:
    largest = float(mean.abs().max())
    if not math.isfinite(largest) or largest == 0.0:
        return torch.zeros_like(mean, dtype=torch.float32)
    grid = 2.0 ** (math.floor(math.log2(largest)) - 4)
    return ((mean / grid).round() * grid).float()
