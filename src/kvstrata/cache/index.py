"""The prefix index: from block keys to content, and from content to the blocks that hold it in each group.

It is a tree of nodes, one for each full block's content after one particular prefix; the root stands for the
model. A node is found by its key, and is taken only if its parent is the node found just before and its
content is the same: so a hit is verified by token ids from position 0 on, whatever the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvstrata.cache.keys import KeyChain

NO_BLOCK = -1


class Node:
    """One full block's content. blocks: physical block by group, -1 where the group has none.

    content: what `KeyChain.contents` has of it. depth: block position, -1 for the root. deadline: from when
    on it is not served. live: whether the index has it still. hides: whether its content depends on a
    retention, as that of all after it then does: it is found without the blocks before it.
    """

    __slots__ = ("blocks", "children", "content", "deadline", "depth", "hides", "key", "live", "parent")

    def __init__(
        self, key: bytes, parent: Node | None, content: bytes, num_groups: int, *, hides: bool = False
    ) -> None:
        self.key = key
        self.parent = parent
        self.content = content
        self.depth: int = parent.depth + 1 if parent else -1
        self.blocks = [NO_BLOCK] * num_groups
        self.children: dict[bytes, Node] = {}
        self.deadline = math.inf
        self.live = True
        self.hides = hides

    @property
    def empty(self) -> bool:
        """Whether no group has a block of it."""
        return all(block == NO_BLOCK for block in self.blocks)


class PrefixIndex:
    """All content that can be found. collisions: how often a key was there with other content behind it.

    gaps: whether content was here that is found without all blocks before it.
    """

    def __init__(self, root_key: bytes, num_groups: int) -> None:
        self._num_groups = num_groups
        self._nodes: dict[bytes, Node] = {}
        self.root = Node(root_key, None, b"", num_groups)
        self.collisions = 0
        self.gaps = False

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The node of a key."""
        return self._nodes.get(key)

    def walk(self, chain: KeyChain, max_blocks: int, now: float) -> list[Node]:
        """Nodes of the longest known prefix of the chain, at most `max_blocks`, up to the first that has
        expired.
        """
        found: list[Node] = []
        parent = self.root
        keys = chain.keys[:max_blocks]
        for node, content in zip(map(self._nodes.get, keys), chain.contents, strict=False):
            if node is None:
                break
            if node.parent is not parent or node.content != content:
                self.collisions += 1
                break
            if node.deadline <= now:
                break
            found.append(node)
            parent = node
        return found

    def child(self, parent: Node, key: bytes, content: bytes, *, hides: bool = False) -> Node | None:
        """The node of this content after `parent`, made if need be; None if other content has its key
        already.
        """
        node = self._nodes.get(key)
        if node is None:
            node = Node(key, parent, content, self._num_groups, hides=hides)
            self.gaps |= hides
            self._nodes[key] = node
            parent.children[key] = node
        elif node.parent is not parent or node.content != content:
            self.collisions += 1
            return None
        return node

    def prune(self, node: Node) -> None:
        """Take out a node without blocks and children, and then its parents of which that is true."""
        while node.parent is not None and node.live and node.empty and not node.children:
            node.live = False
            del self._nodes[node.key]
            del node.parent.children[node.key]
            node = node.parent

    def clear(self) -> None:
        """Forget everything, the root as well, so that nothing is published after what was there before."""
        for node in (self.root, *self):
            node.live = False
        self._nodes.clear()
        self.root = Node(self.root.key, None, b"", self._num_groups)
        self.gaps = False

    def subtree(self, node: Node, *, hiding: bool = True) -> list[Node]:
        """The node and all after it, parents before children; without `hiding`, not those that hide."""
        nodes = [node]
        for each in nodes:
            nodes.extend(child for child in each.children.values() if hiding or not child.hides)
        return nodes
