"""How long content that can be found is still served, and letting it be served longer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvstrata.cache.contents import Contents
from kvstrata.cache.group import CacheGroup
from kvstrata.cache.index import NO_BLOCK, Node
from kvstrata.cache.keys import KeyChain
from kvstrata.cache.policy import Meta
from kvstrata.errors import ConfigError


class Lifetimes:
    """Deadlines of the content of a cache; used by the thread that changes it."""

    def __init__(self, contents: Contents, groups: tuple[CacheGroup, ...]) -> None:
        self._contents = contents
        self._groups = groups

    def earliest(self, chain: KeyChain, num_blocks: int, life_below: float) -> float:
        """When the first of a chain's blocks is served no more, here or in the places below.

        life_below: seconds that those serve a block after it was published. Infinite where none expires.
        """
        nodes = self._nodes(chain, num_blocks)
        deadline = min((node.deadline for node in nodes), default=math.inf)
        if life_below < math.inf:
            born = (meta.born for node in nodes for meta in self._metas(node))
            deadline = min(deadline, min(born, default=math.inf) + life_below)
        return deadline

    def prolong(self, chain: KeyChain, num_blocks: int, deadline: float) -> list[tuple[bytes, int]]:
        """Serve a chain's blocks until `deadline` at least, as if published now; key and group of each."""
        now = self._contents.now()
        prolonged = []
        for node in self._nodes(chain, num_blocks):
            node.deadline = max(node.deadline, deadline)
            for group in self._groups:
                block = node.blocks[group.number]
                if block != NO_BLOCK:
                    meta = replace(group.metas[block], deadline=node.deadline, born=now)
                    group.metas[block] = meta
                    group.policy.insert(node.key, meta, now)
                    prolonged.append((node.key, group.number))
        return prolonged

    def _nodes(self, chain: KeyChain, num_blocks: int) -> Sequence[Node]:
        return self._contents.index.walk(chain, num_blocks, self._contents.now())

    def _metas(self, node: Node) -> Iterator[Meta]:
        return (
            group.metas[node.blocks[group.number]]
            for group in self._groups
            if node.blocks[group.number] != NO_BLOCK
        )


def shortened(ttl: float | None, spread: float) -> float | None:
    """A time to live in seconds without its share `spread`; None, for ever, stays so."""
    return None if ttl is None else ttl * (1 - spread)


def check_ttl(ttl: float | None) -> None:
    """Raise ConfigError where this is no time to live."""
    if ttl is not None and not ttl > 0:
        raise ConfigError(f"ttl is {ttl}: give seconds greater than 0, or None for ever")
