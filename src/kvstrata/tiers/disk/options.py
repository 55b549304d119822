"""What can be said of a disk tier: `disk:///path?size=64GiB&sync=batch`, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from kvstrata.cache.policies import make_policy
from kvstrata.config import parse_bytes
from kvstrata.errors import ConfigError
from kvstrata.tiers.secret import signing_key
from kvstrata.tiers.url import TierUrl, parse_seconds

Sync = Literal["none", "batch", "always"]
SYNCS = ("none", "batch", "always")
OPTIONS = ("size", "sync", "policy", "ttl", "quota", "ro", "hmac")


@dataclass(frozen=True)
class DiskOptions:
    """Settings of one disk tier.

    path: its folder. size: most bytes of all that it keeps there (None: no limit, for looking after a store).
    sync: `none` leaves writing back to the system, `batch` syncs twice a second, `always` before a store is
    done. policy: eviction order. ttl: seconds that any block lives at most. quota: bytes of one cache salt
    (None: no limit). read_only: beside another process that writes. signing_key: of records, if they are
    signed.
    """

    path: Path
    size: int | None = None
    sync: Sync = "batch"
    policy: str = "lru"
    ttl: float = math.inf
    quota: int | None = None
    read_only: bool = False
    signing_key: bytes | None = None

    @classmethod
    def from_url(cls, url: TierUrl, *, needs_size: bool = True) -> DiskOptions:
        """The settings in a URL. Raises ConfigError naming the option, its value and what would be right."""
        url.reject_unknown(OPTIONS)
        if url.netloc or not url.path.startswith("/") or url.path == "/":
            raise ConfigError(f"tier {url.text!r} names no folder; give one such as disk:///var/cache/kv")
        given = url.options
        read_only = _flag("ro", given.get("ro", "0"))
        if "size" not in given and not read_only and needs_size:
            raise ConfigError(f"tier {url.text!r} has no size; give the most it may take, such as size=64GiB")
        sync = given.get("sync", "batch")
        if sync not in SYNCS:
            raise ConfigError(f"sync is {sync!r}; choose one of {', '.join(SYNCS)}")
        policy = given.get("policy", "lru")
        make_policy(policy)  # refuses an unknown one
        return cls(
            path=Path(url.path),
            size=parse_bytes(given["size"], "size") if "size" in given else None,
            sync=cast(Sync, sync),
            policy=policy,
            ttl=parse_seconds(given["ttl"], "ttl") if "ttl" in given else math.inf,
            quota=parse_bytes(given["quota"], "quota") if "quota" in given else None,
            read_only=read_only,
            signing_key=signing_key(given["hmac"]) if "hmac" in given else None,
        )


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{name} is {text!r}; give 1 or 0")
    return text == "1"
