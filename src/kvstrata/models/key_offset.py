"""What the keys of a layer have in common: taken off before they are quantised.

A softmax over keys does not change when the same vector is taken off all of them, so nothing is added back
where they are read, and codes are spent on what differs. It is measured once a model, over tokens that are
always the same: their mean key before RoPE, turned to all positions of a context and averaged again,
since what turns quickly has no mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib.resources import files

import torch
from torch import Tensor

from kvstrata.models.batch import ForwardBatch, GroupBatch
from kvstrata.models.decoder import Decoder
from kvstrata.models.rope import Rotation

_TEXT = "plain_text.txt"
_MOST_TOKENS = 512
_CONTEXT = 1024
_BLOCK = 16
_rope = torch.ops.kvstrata.rope.default


def measure_key_offsets(
    decoder: Decoder, encode: Callable[[str], list[int]], layers: Iterable[int]
) -> dict[int, Tensor]:
    """The mean key of each of `layers`, float32 `[num_kv_heads, head_dim]`, over a text of our own.

    encode: from a text to the model's token ids.
    Rounded to a 32nd of the layer's largest, so that arithmetic that differs in its last bits gives the same.
    The decoder must have no offsets yet.
    """
    wanted = tuple(layers)
    if not wanted:
        return {}
    text = files("kvstrata.models").joinpath(_TEXT).read_text(encoding="utf-8")
    token_ids = encode(text)[:_MOST_TOKENS]
    if not token_ids:
        return {}
    keys = _keys(decoder, token_ids)
    slots = torch.arange(len(token_ids), device=decoder.device)
    context = torch.arange(_CONTEXT, device=decoder.device)
    return {
        layer: _rounded(
            _mean_at(keys[layer], decoder.rotation(layer, slots), decoder.rotation(layer, context))
        )
        for layer in wanted
    }


def _keys(decoder: Decoder, token_ids: list[int]) -> dict[int, Tensor]:
    """Each layer's keys of the tokens, after RoPE, float32 `[num_tokens, num_kv_heads, head_dim]`."""
    config, device = decoder.config, decoder.device
    count = len(token_ids)
    blocks = -(-count // _BLOCK)
    slots = torch.arange(count, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)
    shape = (2, config.num_kv_heads, _BLOCK, config.head_dim)
    pools = [
        torch.zeros((blocks, len(layers), *shape), dtype=torch.float32, device=device)
        for _, layers in decoder.groups
    ]
    decoder.forward(
        ForwardBatch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=slots,
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([count], dtype=torch.int32, device=device),
            logit_rows=slots[-1:],
            groups=tuple(GroupBatch(pool, table, slots) for pool in pools),
        )
    )
    return {
        layer: pool[:, index, 0].transpose(1, 2).flatten(0, 1)[:count]
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
