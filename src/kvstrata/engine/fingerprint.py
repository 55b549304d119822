"""The model fingerprint: the first parent of every block key, different wherever K and V could differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from kvstrata.models.config import DecoderConfig

# Raise it when the pool's layout or the meaning of a key changes.
LAYOUT_VERSION = 2


def fingerprint(
    *,
    weights_digest: bytes,
    config: DecoderConfig,
    kv_dtype: str,
    key_offsets: Mapping[int, Tensor],
    skipped: Mapping[str, Sequence[int]],
    block_size: int,
    weight_mode: str,
    arithmetic_version: str,
) -> bytes:
    """32 bytes: SHA-256 over all that K and V of a token depend on besides the tokens before it.

    key_offsets: what is taken off the keys, by layer. skipped: layers in other formats than kv_dtype, by
    format.
    """
    parts: dict[str, object] = {
        "weights": weights_digest.hex(),
        "config": asdict(config),
        "kv_dtype": kv_dtype,
        "layout": LAYOUT_VERSION,
        "block_size": block_size,
        "weight_mode": weight_mode,
        "arithmetic": arithmetic_version,
    }
    if key_offsets:
        parts["key_offsets"] = {layer: offset.tolist() for layer, offset in key_offsets.items()}
    if skipped:
        parts["skipped"] = skipped
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
