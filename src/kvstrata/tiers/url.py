"""Tiers are named by URLs: `ram://?size=4GiB`, `disk:///path?size=64GiB&sync=batch`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstrata.errors import ConfigError

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class TierUrl:
    """A tier's URL, taken apart. text: as given. options: of its query, each once."""

    text: str
    scheme: str
    netloc: str
    path: str
    options: dict[str, str]

    def reject_unknown(self, known: tuple[str, ...]) -> None:
        """Raise ConfigError, naming the known ones, if an option is none of `known`."""
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"tier {self.text!r} has option {name!r}; {self.scheme} takes {', '.join(known)}"
                )


def parse_tier_url(text: str) -> TierUrl:
    """Take a URL apart. Raises ConfigError for what is none, or names an option twice or without value."""
    try:
        parts = urlsplit(text) if isinstance(text, str) and "://" in text else None
        query = parse_qsl(parts.query, keep_blank_values=True) if parts is not None else []
    except ValueError:  # a bracket without its other, say
        parts = None
    if parts is None or not parts.scheme:
        raise ConfigError(f"tier {text!r} is no URL; give one such as ram://?size=4GiB")
    if parts.fragment or "\0" in unquote(text):
        raise ConfigError(f"tier {text!r} has a # or a zero byte; write %23 for a # in a folder's name")
    options: dict[str, str] = {}
    for name, value in query:
        if name in options:
            raise ConfigError(f"tier {text!r} has option {name!r} twice; give it once")
        options[name] = value
    return TierUrl(text, parts.scheme, parts.netloc, unquote(parts.path), options)


def parse_seconds(text: str, field_name: str) -> float:
    """Seconds from `90`, `90s`, `15m`, `12h` or `7d`. Raises ConfigError otherwise."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([smhd]?)\s*", text, re.ASCII)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"{field_name} is {text!r}; give a time such as 90s, 15m, 12h or 7d")
    return seconds
