"""Text as it is generated: never half a character, never part of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata.errors import ConfigError
from kvstrata.models.tokenizer import Tokenizer


class IncrementalDecoder:
    """Turns a stream of token ids into text; pushes and `finish` join to `tokenizer.decode(ids)`."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._after_special = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; bytes of an unfinished character wait for the next push."""
        data, self._after_special = self._tokenizer.to_bytes(
            ids, self._skip_special_tokens, after_special=self._after_special
        )
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: one U+FFFD where the stream ends within a character, else nothing."""
        return self._utf8.decode(b"", final=True)


@dataclass
class _Node:
    """A prefix of a stop string, in the automaton of Aho and Corasick."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    match: str | None = None  # the longest stop string that ends here


def _automaton(stop: Sequence[str]) -> _Node:
    root = _Node(0)
    for text in stop:
        node = root
        for char in text:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.match = text
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            fallback = node.fallback
            while fallback is not None and char not in fallback.next:
                fallback = fallback.fallback
            child.fallback = root if fallback is None else fallback.next[char]
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


class StopMatcher:
    """Ends a stream at the first stop string that is completed.

    Of stop strings that end at the same character the longest counts. At any time exactly the text that may
    still become a stop string is held back, at most `len(stop) - 1` characters; each character is looked at
    in amortised constant time (Aho and Corasick, CACM 18(6), 1975).
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        if any(not isinstance(text, str) or not text for text in stop):
            raise ConfigError(f"stop: {list(stop)!r} has an empty entry; give non-empty strings")
        self._root = self._node = _automaton(stop)
        self._include_stop = include_stop
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string once one is complete; nothing follows it."""
        if self._stopped is not None:
            return "", self._stopped
        if not self._root.next:
            return text, None
        node = self._node
        for index, char in enumerate(text):
            while char not in node.next and node.fallback is not None:
                node = node.fallback
            node = node.next.get(char, node)
            if node.match is not None:
                self._stopped = node.match
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole if self._include_stop else whole[: -len(node.match)], node.match
        self._node = node
        whole = self._held + text
        shown = len(whole) - node.depth
        self._held = whole[shown:]
        return whole[:shown], None

    def finish(self) -> str:
        """The text that was held back for a stop string that never completed."""
        held, self._held, self._node = self._held, "", self._root
        return held
