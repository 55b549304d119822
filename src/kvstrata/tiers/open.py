"""From a URL to the tier that it names."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.errors import ConfigError
from kvstrata.tiers.ram import RamOptions, RamTier
from kvstrata.tiers.tier import StoreContext, Tier
from kvstrata.tiers.url import TierUrl, parse_tier_url


def _disk(url: TierUrl, context: StoreContext) -> Tier:
    from kvstrata.tiers.disk import DiskTier  # noqa: PLC0415  (only who has one pays for its import)

    return DiskTier.open(url, context)


def _check_disk(url: TierUrl) -> object:
    from kvstrata.tiers.disk.options import DiskOptions  # noqa: PLC0415

    return DiskOptions.from_url(url)


def _valkey(url: TierUrl, context: StoreContext) -> Tier:
    from kvstrata.tiers.valkey.tier import ValkeyTier  # noqa: PLC0415

    return ValkeyTier.open(url, context)


def _check_valkey(url: TierUrl) -> object:
    from kvstrata.tiers.valkey.settings import ValkeySettings  # noqa: PLC0415

    return ValkeySettings.from_url(url)


_CHECKS: dict[str, Callable[[TierUrl], object]] = {
    "ram": RamOptions.from_url,
    "disk": _check_disk,
    "valkey": _check_valkey,
    "valkey+cluster": _check_valkey,
}
_SCHEMES: dict[str, Callable[[TierUrl, StoreContext], Tier]] = {
    "ram": RamTier.open,
    "disk": _disk,
    "valkey": _valkey,
    "valkey+cluster": _valkey,
}


def check_tier_url(text: str) -> TierUrl:
    """Take a tier's URL apart. Raises ConfigError for an unknown kind, naming those there are, and for
    options that cannot be right; what is there is not looked at.
    """
    url = parse_tier_url(text)
    if url.scheme not in _SCHEMES:
        raise ConfigError(
            f"tier {text!r} is of kind {url.scheme!r}; the kinds are {', '.join(sorted(_SCHEMES))}"
        )
    _CHECKS[url.scheme](url)
    return url


def open_tier(url: str, context: StoreContext) -> Tier:
    """Open the tier that a URL names, for the blocks of a context. Raises ConfigError."""
    taken = check_tier_url(url)
    return _SCHEMES[taken.scheme](taken, context)
