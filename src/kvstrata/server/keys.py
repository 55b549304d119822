"""API keys: who may ask, told apart in constant time, each walled off from the others' cached prompts.

An entry is `name:key`, or a key alone. A key file has one entry a line; empty lines and lines that begin with
`#` are skipped.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstrata.errors import ConfigError

MIN_LENGTH = 8  # characters; shorter ones can be guessed


@dataclass(frozen=True)
class ApiKey:
    """One key: the name that logs show, and the SHA-256 of its secret; the secret itself is not kept.

    admin: may change the cache. metrics: may read /metrics, and nothing else.
    """

    name: str
    digest: bytes
    admin: bool = False
    metrics: bool = False

    def salted(self, cache_salt: str) -> str:
        """A cache salt of this key's own, for the salt that a request asks for."""
        return hmac.new(self.digest, b"cache salt:" + cache_salt.encode(), hashlib.sha256).hexdigest()


class KeyRing:
    """The keys of one server. api_keys: who may use it at all (none: everyone). admin: who may change the
    cache (None: nobody); that key may do the rest as well. metrics: who may read /metrics, beside the admin.
    """

    def __init__(
        self,
        api_keys: Sequence[ApiKey] = (),
        admin: ApiKey | None = None,
        metrics: ApiKey | None = None,
    ) -> None:
        self.required = bool(api_keys)
        self.has_admin = admin is not None
        self.has_metrics = metrics is not None
        self._keys = [*api_keys, *(key for key in (admin, metrics) if key is not None)]
        self.names = [key.name for key in self._keys]
        for attribute in ("name", "digest"):
            values = [getattr(key, attribute) for key in self._keys]
            twice = next((k.name for k in self._keys if values.count(getattr(k, attribute)) > 1), None)
            if twice is not None:
                raise ConfigError(f"api_keys has the key or name of {twice!r} twice; give each its own")

    def named(self, name: str) -> ApiKey | None:
        """The key of that name that may ask for answers."""
        return next((key for key in self._keys if key.name == name and not key.metrics), None)

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret; takes the same time whichever it is, and where it is none."""
        digest = hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


Kind = Literal["api", "admin", "metrics"]


def parse_keys(entries: Iterable[str], source: str, kind: Kind = "api") -> list[ApiKey]:
    """Keys from entries; raises ConfigError naming `source` and the entry's number, never the secret."""
    keys = []
    for number, entry in enumerate(entries, start=1):
        name, colon, secret = (part.strip() for part in entry.partition(":"))
        if not colon:
            name, secret = (f"key-{number}" if kind == "api" else kind), name
        if (
            not name
            or len(secret) < MIN_LENGTH
            or not secret.isascii()
            or any(c.isspace() for c in name + secret)
        ):
            raise ConfigError(
                f"{source}: entry {number} is no key; give NAME:KEY, the key at least {MIN_LENGTH} "
                "characters of ASCII"
            )
        digest = hashlib.sha256(secret.encode()).digest()
        keys.append(ApiKey(name, digest, admin=kind == "admin", metrics=kind == "metrics"))
    return keys


def read_keys(path: str, field: str, kind: Kind = "api") -> list[ApiKey]:
    """Keys from a file. Raises ConfigError where it cannot be read or holds none."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:  # a ValueError: no text, or no path can be so
        is_no_text = isinstance(error, UnicodeDecodeError)
        reason = "it is no UTF-8 text" if is_no_text else getattr(error, "strerror", None) or error
        raise ConfigError(f"{field} is {path!r}; it cannot be read: {reason}") from error
    keys = parse_keys((line for line in lines if line and line[0] != "#"), f"{field} {path!r}", kind)
    if not keys:
        raise ConfigError(f"{field} is {path!r}; it holds no key")
    return keys


def load_keys(
    api_key_file: str | None,
    admin_key_file: str | None,
    api_keys: str = "",
    admin_key: str = "",
    *,
    metrics_key_file: str | None = None,
    metrics_key: str = "",
) -> KeyRing:
    """The key ring of files and of texts from the environment; these have entries between spaces or commas.

    Raises ConfigError.
    """
    keys = read_keys(api_key_file, "api_key_file") if api_key_file is not None else []
    keys += parse_keys(api_keys.replace(",", " ").split(), "KVSTRATA_API_KEYS")
    admin = _one_key(admin_key_file, admin_key, "admin")
    return KeyRing(keys, admin, _one_key(metrics_key_file, metrics_key, "metrics"))


def _one_key(path: str | None, text: str, kind: Kind) -> ApiKey | None:
    field, variable = f"{kind}_key_file", f"KVSTRATA_{kind.upper()}_KEY"
    keys = read_keys(path, field, kind) if path is not None else []
    keys += parse_keys(text.split(), variable, kind)
    if len(keys) > 1:
        raise ConfigError(f"{field} and {variable} hold {len(keys)} keys; give one")
    return keys[0] if keys else None
