"""What a retention means, in plain torch and without a pool: raw keys, rotated when they are used.

As in StreamingLLM (arXiv 2309.17453) the visible keys stand at positions 0, 1, 2, ... of a cache, whatever
was between them, and the query at the last of these. That is another way to the same result than the
engine's, which rotates each key once, to its true position, and rotates a second query for the sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.cache.formats import POOL_DTYPES
from kvstrata.cache.retention import Retention
from kvstrata.kernels import kv_formats, reference
from kvstrata.models.config import RopeConfig
from kvstrata.models.decoder import Decoder
from kvstrata.models.rope import inverse_frequencies, magnitude


@torch.inference_mode()
def logprobs(decoder: Decoder, ids: list[int], retention: Retention, kv_dtype: str = "fp32") -> Tensor:
    """Log-probabilities after each token, `[num_tokens, vocab_size]`; weights must be float32."""
    config, weights = decoder.config, decoder._weights
    hidden = weights.embedding(torch.tensor(ids)) * config.embedding_scale

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else reference.rms_norm(x, weight, config.norm_eps)

    for kind, layer in zip(config.layers, weights.layers, strict=True):
        heads = layer.qkv(norm(hidden, layer.attn_norm)).unflatten(1, (-1, config.head_dim))
        query, key, value = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        query, key = norm(query, layer.q_norm), norm(key, layer.k_norm)
        key, value = stored(key, value, kind.rope, kv_dtype)
        seen = retention.within(kind.window)
        rows = [
            attend(query[p], key, value, p, seen, kind.rope, config.attention_scale) for p in range(len(ids))
        ]
        hidden = hidden + norm(layer.o(torch.stack(rows).flatten(1)), layer.post_attn_norm)
        gate, up = layer.gate_up(norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
        inner = reference.gated_activation(gate.contiguous(), up.contiguous(), config.activation)
        hidden = hidden + norm(layer.down(inner), layer.post_mlp_norm)
    logits: Tensor = weights.head(norm(hidden, weights.final_norm))
    return logits.log_softmax(-1)


def attend(  # noqa: PLR0917
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    seen: Retention,
    rope: RopeConfig,
    scale: float,
) -> Tensor:
    """One token's attention over raw keys and values, `[num_heads, head_dim]`."""
    visible = [
        at
        for at in range(position + 1)
        if seen.window is None or at > position - seen.window or at < seen.sinks
    ]
    own = rotated(query[None], torch.tensor([len(visible) - 1]), rope)[0]
    cached = rotated(keys[visible], torch.arange(len(visible)), rope)
    repeats = len(query) // keys.shape[1]
    cached, content = (x.repeat_interleave(repeats, dim=1) for x in (cached, values[visible]))
    weights = (torch.einsum("hd,khd->hk", own, cached) * scale).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, content)


def rotated(x: Tensor, positions: Tensor, rope: RopeConfig) -> Tensor:
    """`[num_tokens, num_heads, head_dim]` turned by the angles of these positions, negative ones back."""
    angles = torch.outer(positions.double(), inverse_frequencies(rope, x.shape[-1]))
    size = magnitude(rope)
    return reference.rope(x.contiguous(), (angles.cos() * size).float(), (angles.sin() * size).float())


def stored(key: Tensor, value: Tensor, rope: RopeConfig, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Raw keys and values as a pool of this format holds them: rounded at the key's true position."""
    positions = torch.arange(len(key))
    key = rotated(key, positions, rope)
    dtype = POOL_DTYPES[kv_dtype]
    if kv_dtype in ("fp32", "bf16", "fp16"):
        key, value = key.to(dtype).float(), value.to(dtype).float()
    else:
        key = kv_formats.dequantise(*kv_formats.quantise(key, dtype, key=True))
        value = kv_formats.dequantise(*kv_formats.quantise(value, dtype, key=False))
        if kv_dtype == "int4":
            key = kv_formats.rotate(key)  # a Hadamard matrix of a power of two is its own inverse
    return rotated(key, -positions, rope), value
