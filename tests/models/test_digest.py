"""The digest of weights: the same for the same bytes, another for any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_gguf, weights

from kvstrata.models import digest
from kvstrata.models.digest import weights_digest
from kvstrata.models.gguf_source import GGUFSource


def digest_of(
    path: Path, architecture: str = "llama", seed: int = 0, change: str = "", copy_of: str = ""
) -> bytes:
    tensors = weights(seed)
    if change:
        tensors[change] = tensors[change].copy()
        tensors[change].reshape(-1)[-1] += 1
    if copy_of:
        tensors["layers.0.gate.weight"], tensors["layers.0.up.weight"] = (
            tensors["layers.0.up.weight"],
            tensors["layers.0.gate.weight"],
        )
    return weights_digest(GGUFSource(tiny_gguf(path, architecture, tensors)))


def test_digest_is_32_bytes_and_repeats_across_files(tmp_path: Path) -> None:
    first = digest_of(tmp_path / "a.gguf")
    assert len(first) == 32
    assert digest_of(tmp_path / "b.gguf") == first


def test_any_change_gives_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    digests = {
        digest_of(path),
        digest_of(path, seed=1),
        digest_of(path, change="layers.1.down.weight"),
        digest_of(path, change="final_norm.weight"),
        digest_of(path, copy_of="swapped"),
        digest_of(path, "qwen2"),  # the same bytes, but rows of q and k in another order
    }
    assert len(digests) == 6


def test_a_change_in_a_later_piece_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", 256)
    path = tmp_path / "a.gguf"
    assert digest_of(path, change="embed.weight") != digest_of(path)


def test_default_model_has_one_digest(smollm2_path: Path) -> None:
    source = GGUFSource(smollm2_path)
    assert weights_digest(source) == weights_digest(source)
    assert np.frombuffer(weights_digest(source), np.uint8).any()
