"""The key that signs records: read from the environment or a file, never from the URL itself."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.errors import ConfigError

LEAST_BYTES = 16


def signing_key(source: str) -> bytes:
    """The key named by `env:NAME` or `file:PATH`, without white space around it.

    Raises ConfigError for another form, a name or file that is not there, and a key under 16 bytes.
    """
    kind, _, place = source.partition(":")
    if kind == "env" and place:
        if place not in os.environ:
            raise ConfigError(f"hmac is {source!r}, but the environment has no {place}; set it to the key")
        key = os.environ[place].encode()
    elif kind == "file" and place:
        try:
            key = Path(place).read_bytes()
        except (OSError, ValueError) as error:  # a ValueError: no path can be so
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"hmac is {source!r}, which cannot be read: {reason}") from None
    else:
        raise ConfigError(f"hmac is {source!r}; give env:NAME or file:PATH, where the key is")
    key = key.strip()
    if len(key) < LEAST_BYTES:
        raise ConfigError(f"hmac: the key in {source!r} has {len(key)} bytes; it needs {LEAST_BYTES}")
    return key
