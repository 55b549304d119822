"""Any field of any known configuration replaced by nonsense: a size, or an error by name, never a crash."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from model_configs import CONFIGS

from kvstrata.cache.formats import format_named
from kvstrata.cache.parameters import weights_bytes
from kvstrata.cache.shapes import cache_shape
from kvstrata.cache.sizing import cache_size
from kvstrata.errors import KVStrataError
from kvstrata.models.hf_config import decoder_config

NUMBERS: list[Any] = [0, -1, 3, 1.5, 1e308, math.nan, math.inf, 10**30]
NONSENSE: list[Any] = [*NUMBERS, "x", "", None, True, False, [], [1], ["x"], [None], {}, {"a": 1}]


def variants(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration with each field, nested ones too, replaced in turn by each nonsense and left out."""
    found: list[dict[str, Any]] = []
    for key, value in config.items():
        found.append({name: kept for name, kept in config.items() if name != key})
        found.extend({**config, key: nonsense} for nonsense in NONSENSE)
        if isinstance(value, dict):
            found.extend({**config, key: inner} for inner in variants(value))
    return found


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_nonsense_field_is_refused_by_name_or_harmless(name: str) -> None:
    for config in variants({"mlp_only_layers": [], **CONFIGS[name]}):
        for read in (sized, weighed, loaded):
            with contextlib.suppress(KVStrataError):
                read(config)


def sized(config: dict[str, Any]) -> None:
    size = cache_size(cache_shape(config), format_named("bf16"), length=100, batch=2, block_size=16)
    assert size.total_bytes >= 0


def weighed(config: dict[str, Any]) -> None:
    assert weights_bytes(config, "auto")[0] >= 0


def loaded(config: dict[str, Any]) -> None:
    decoder_config(config, "config.json")
