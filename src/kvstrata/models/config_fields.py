"""Typed reading of a configuration: every field is checked once, and an error names file, field and value."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.errors import ModelError
from kvstrata.models.config import DecoderConfig

MAX_LAYERS = 10_000  # far above any model; a damaged count must not become an allocation


def shown(value: object) -> str:
    """A value for a one-line message, shortened: a vocabulary may stand where a number should."""
    return reprlib.repr(value)


class Fields:
    """A mapping of configuration values with a prefix on its keys.

    A key that is absent or null takes the default; without one it is an error.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def error(self, key: str, what: str) -> ModelError:
        """A ModelError about one field."""
        return ModelError(f"{self.where}: {self.prefix}{key} {what}")

    def get(self, key: str) -> Any:
        """The value as it is; None where it is absent or null."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"is {shown(value)}, expected an integer of at least {least}")
        return value

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        """An integer of at least `least`, or None where it is absent."""
        return None if self.get(key) is None else self.integer(key, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"is {shown(value)}, expected a number")
        if not math.isfinite(value) or value <= 0:
            raise self.error(key, f"is {shown(value)}, expected a finite number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite positive number, or None where it is absent."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)}, expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else f"is {shown(value)}, expected a string")
        return value

    def layers(self, key: str) -> int:
        """A number of layers."""
        count = self.integer(key)
        if count > MAX_LAYERS:
            raise self.error(key, f"is {count}, more than {MAX_LAYERS} layers")
        return count

    def must_not_be_set(self, keys: Iterable[str], why: str) -> None:
        """Raise where a field asks for something that the decoder does not do."""
        for key in keys:
            value = self.get(key)
            unset = value is None or (isinstance(value, bool | int | float) and value == 0)
            if not unset:
                raise self.error(key, f"is {shown(value)}: {why}")


def check_config(config: DecoderConfig, where: str) -> DecoderConfig:
    """The configuration itself, once its fields are known to fit together. Raises ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{where}: {config.num_heads} query heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{where}: head dimension {config.head_dim} is odd, RoPE needs pairs")
    for rope in {layer.rope for layer in config.layers}:
        if rope.freq_factors is not None and len(rope.freq_factors) != config.head_dim // 2:
            raise ModelError(
                f"{where}: {len(rope.freq_factors)} RoPE frequency factors for a head dimension of "
                f"{config.head_dim}, expected {config.head_dim // 2}"
            )
    named = [*config.eos_token_ids, *([] if config.bos_token_id is None else [config.bos_token_id])]
    for token in named:
        if not 0 <= token < config.vocab_size:
            raise ModelError(f"{where}: token id {token} is outside the vocabulary of {config.vocab_size}")
    return config
