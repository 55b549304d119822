"""Retention: which tokens a query sees, and so which blocks a sequence needs.

`full` sees all before it, `window:W` the last W tokens, itself included, `sinks:S+W` the first S besides
(StreamingLLM, arXiv 2309.17453: the first tokens draw attention whatever they are, and a window without them
falls apart). A layer with a sliding window of its own keeps that. All the arithmetic of windows is here; what
matching, growth, loads and keys need of it are blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvstrata.errors import ConfigError

_FORM = (
    "give full, window:W (the last W tokens) or sinks:S+W (the first S and the last W), such as sinks:4+1020"
)
_MOST = 2**30


@dataclass(frozen=True)
class Retention:
    """The first `sinks` tokens and the last `window` are seen; all where window is None.

    Raises ConfigError for a window below 1, and for sinks below 0 or without a window.
    """

    sinks: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is None:
            if self.sinks:
                raise ConfigError(f"retention has {self.sinks} sinks and no window; {_FORM}")
        elif not (1 <= self.window <= _MOST and 0 <= self.sinks <= _MOST):
            raise ConfigError(
                f"retention is {str(self)!r}; S is 0 or more, W 1 or more, and both at most {_MOST}"
            )

    @classmethod
    def parse(cls, text: object, field: str = "retention") -> Retention:
        """From `full`, `window:W` or `sinks:S+W`. Raises ConfigError that names `field` and says what would
        do.
        """
        match = None
        if isinstance(text, str):
            match = re.fullmatch(r"full|(?:window:|sinks:(\d{1,12})\+)(\d{1,12})", text.strip(), re.ASCII)
        if match is None:
            raise ConfigError(f"{field} is {text!r}; {_FORM}")
        if match[2] is None:
            return FULL
        sinks, window = int(match[1] or 0), int(match[2])
        if not 1 <= window <= _MOST or sinks > _MOST:
            raise ConfigError(
                f"{field} is {text!r}; W is at least 1, and S and W at most {_MOST}: such as sinks:4+1020"
            )
        return cls(sinks, window)

    def __str__(self) -> str:
        if self.window is None:
            return "full"
        return f"sinks:{self.sinks}+{self.window}" if self.sinks else f"window:{self.window}"

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever hidden."""
        return self.window is None

    @property
    def unhidden(self) -> int | None:
        """Positions below this see all before them; None where all do."""
        return None if self.window is None else self.sinks + self.window

    def within(self, window: int | None) -> Retention:
        """What a query sees in layers whose own sliding window is `window` (None: full attention)."""
        return self if window is None else Retention(0, window)

    def own_from(self, block_size: int) -> int | None:
        """The first block in which a token hides something, whose K and V so depend on the retention."""
        return None if self.unhidden is None else self.unhidden // block_size

    def hidden_blocks(self, position: int, block_size: int) -> range:
        """Positions of the blocks of which no query at `position` or later sees anything."""
        if self.window is None:
            return range(0)
        begin = -(-self.sinks // block_size)
        return range(begin, max(begin, (position - self.window + 1) // block_size))

    def visible_blocks(self, end: int, block_size: int) -> Iterator[int]:
        """Positions of the first `end` blocks of which a query at position `end * block_size` sees some."""
        hidden = self.hidden_blocks(end * block_size, block_size)
        yield from range(min(hidden.start, end))
        yield from range(hidden.stop, end)

    def most_blocks(self, max_chunk: int, block_size: int) -> int | None:
        """Most blocks of one sequence alive at once when it computes at most `max_chunk` tokens a step."""
        if self.window is None:
            return None
        return -(-self.sinks // block_size) - (-(self.window - 1 + max_chunk) // block_size) + 1


FULL = Retention()
