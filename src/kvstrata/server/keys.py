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

from kvstrata.errors import ConfigError

MIN_LENGTH = 8  # characters; shorter ones can be guessed


@dataclass(frozen=True)
class ApiKey:
    """One key: the name that logs show, and the SHA-256 of its secret; the secret itself is not kept."""

    name: str
    digest: bytes
    admin: bool = False

    def salted(self, cache_salt: str) -> str:
        """A cache salt of this key's own, for the salt that a request asks for."""
        return hmac.new(self.digest, b"cache salt:" + cache_salt.encode(), hashlib.sha256).hexdigest()


class KeyRing:
    """The keys of one server. api_keys: who may use it at all (none: everyone). admin: who may change the
    cache (None: nobody); that key may do the rest as well.
    """

    def __init__(self, api_keys: Sequence[ApiKey] = (), admin: ApiKey | None = None) -> None:
        self.required = bool(api_keys)
        self.has_admin = admin is not None
        self.names = [key.name for key in (*api_keys, *([admin] if admin is not None else []))]
        self._keys = [*api_keys, *([admin] if admin is not None else [])]
        for attribute in ("name", "digest"):
            values = [getattr(key, attribute) for key in self._keys]
            twice = next((k.name for k in self._keys if values.count(getattr(k, attribute)) > 1), None)
            if twice is not None:
                raise ConfigError(f"api_keys has the key or name of {twice!r} twice; give each its own")

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret; takes the same time whichever it is, and where it is none."""
        digest = hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def parse_keys(entries: Iterable[str], source: str, *, admin: bool = False) -> list[ApiKey]:
    """Keys from entries; raises ConfigError naming `source` and the entry's number, never the secret."""
    keys = []
    for number, entry in enumerate(entries, start=1):
        name, colon, secret = (part.strip() for part in entry.partition(":"))
        if not colon:
            name, secret = ("admin" if admin else f"key-{number}"), name
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
        keys.append(ApiKey(name, hashlib.sha256(secret.encode()).digest(), admin))
    return keys


def read_keys(path: str, field: str, *, admin: bool = False) -> list[ApiKey]:
    """Keys from a file. Raises ConfigError where it cannot be read or holds none."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{field} is {path!r}; it cannot be read: {reason}") from error
    keys = parse_keys((line for line in lines if line and line[0] != "#"), f"{field} {path!r}", admin=admin)
    if not keys:
        raise ConfigError(f"{field} is {path!r}; it holds no key")
    return keys


def load_keys(
    api_key_file: str | None, admin_key_file: str | None, api_keys: str = "", admin_key: str = ""
) -> KeyRing:
    """The key ring of files and of texts from the environment; these have entries between spaces or commas.

    Raises ConfigError.
    """
    keys = read_keys(api_key_file, "api_key_file") if api_key_file is not None else []
    keys += parse_keys(api_keys.replace(",", " ").split(), "KVSTRATA_API_KEYS")
    admins = read_keys(admin_key_file, "admin_key_file", admin=True) if admin_key_file is not None else []
    admins += parse_keys(admin_key.split(), "KVSTRATA_ADMIN_KEY", admin=True)
    if len(admins) > 1:
        raise ConfigError(f"admin_key_file and KVSTRATA_ADMIN_KEY hold {len(admins)} keys; give one")
    return KeyRing(keys, admins[0] if admins else None)
