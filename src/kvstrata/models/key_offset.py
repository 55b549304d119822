"""What the keys of a layer have in common: taken off before they are quantised.

A softmax over keys does not change when the same vector is taken off all of them, so nothing is added back
where they are read. It is measured once a model, over tokens that are always the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.decoder import Decoder

_TOKENS = 128
_BLOCK = 16
_STRIDE = 2654435761  # 2^32 over the golden ratio: spreads ids over any vocabulary


def measure_key_offsets(decoder: Decoder, layers: Iterable[int]) -> dict[int, Tensor]:
    """The mean key of each of `layers` over some tokens, float32 `[num_kv_heads, head_dim]`.

    Rounded to a 32nd of the layer's largest, so that arithmetic that differs in its last bits gives the same.
    The decoder must have no offsets yet.
    """
    wanted = tuple(layers)
    if not wanted:
        return {}
    config, device = decoder.config, decoder.device
    blocks = _TOKENS // _BLOCK
    shape = (2, config.num_kv_heads, _BLOCK, config.head_dim)
    slots = torch.arange(_TOKENS, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    pools = [
        torch.zeros((blocks, len(group), *shape), dtype=torch.float32, device=device)
        for _, group in decoder.groups
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
    means = {
        layer: pool[:, index, 0].double().mean(dim=(0, 2))
        for pool, (_, group) in zip(pools, decoder.groups, strict=True)
        for index, layer in enumerate(group)
    }
    return {layer: _rounded(means[layer]) for layer in wanted}


def _rounded(mean: Tensor) -> Tensor:
    largest = float(mean.abs().max())
    if not math.isfinite(largest) or largest == 0.0:
        return torch.zeros_like(mean, dtype=torch.float32)
    grid = 2.0 ** (math.floor(math.log2(largest)) - 4)
    return ((mean / grid).round() * grid).float()
