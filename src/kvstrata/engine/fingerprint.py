"""The model fingerprint: the first parent of every block key, different wherever K and V could differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from kvstrata.models.config import DecoderConfig

# Raise it when the pool's layout or the meaning of a key changes.
LAYOUT_VERSION = 1


def fingerprint(
    *,
    weights_digest: bytes,
    config: DecoderConfig,
    kv_dtype: str,
    block_size: int,
    weight_mode: str,
    arithmetic_version: str,
) -> bytes:
    """32 bytes: SHA-256 over all that K and V of a token depend on besides the tokens before it."""
    parts = {
        "weights": weights_digest.hex(),
        "config": asdict(config),
        "kv_dtype": kv_dtype,
        "layout": LAYOUT_VERSION,
        "block_size": block_size,
        "weight_mode": weight_mode,
        "arithmetic": arithmetic_version,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
