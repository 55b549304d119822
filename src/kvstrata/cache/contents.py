"""What the pools hold that can be found: found, published, evicted, expired, forgotten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from kvstrata.cache.group import CacheGroup, EvictReason, HeldKeys
from kvstrata.cache.index import NO_BLOCK, Node, PrefixIndex
from kvstrata.cache.keys import KeyChain
from kvstrata.cache.matching import longest_hit
from kvstrata.cache.policy import Meta
from kvstrata.cache.table import CacheSequence
from kvstrata.errors import IntegrityError

OnEvict = Callable[[bytes, int, Meta, EvictReason], None]
OnPublish = Callable[[bytes, int, int, Meta], None]


class Watcher(Protocol):
    """Who is told of what blocks go through, on the thread that changes the cache; it must not change it."""

    def published(self, key: bytes, group: int, meta: Meta, *, loaded: bool) -> None:
        """A block can be found from now on. loaded: its content came from a tier and was not computed."""

    def evicted(self, key: bytes, group: int, meta: Meta, reason: EvictReason) -> None:
        """A block can no longer be found."""

    def hit(self, chain: KeyChain, num_blocks: int) -> None:
        """A sequence was opened on the first blocks of a chain."""

    def released(self, keys: Sequence[bytes], group: int) -> None:
        """Blocks that can be found have no holder from now on."""


class Contents:
    """The prefix index over the blocks of all groups, and the rules by which content comes and goes.

    A node whose block of a full-attention group goes leaves with all its blocks, and with those after it,
    since no hit can reach them: but for content that depends on a retention, whose hits need what is visible
    only, and for what somebody holds. One whose deadline has come leaves with all after it.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        fingerprint: bytes,
        clock: Callable[[], float],
        on_evict: OnEvict | None,
        on_publish: OnPublish | None,
    ) -> None:
        self.index = PrefixIndex(fingerprint, len(groups))
        self.on_evict = on_evict
        self.on_publish = on_publish
        self.watcher: Watcher | None = None
        self._groups = groups
        self._held = tuple(HeldKeys(self.index, group) for group in groups)
        self._clock = clock
        self._last_now = -math.inf
        self._last_hit: tuple[KeyChain, list[Node]] | None = None  # until something is forgotten

    def now(self) -> float:
        """The clock's time, nudged so that each event has its own: recency then never ties."""
        self._last_now = max(self._clock(), math.nextafter(self._last_now, math.inf))
        return self._last_now

    def find(self, chain: KeyChain, max_blocks: int) -> list[Node]:
        """Nodes of the longest hit of at most `max_blocks` blocks."""
        nodes = self.index.walk(chain, max_blocks, self._clock())
        del nodes[longest_hit(nodes, self._groups, chain.retention) :]
        self._last_hit = (chain, nodes)
        return nodes

    def take_hit(self, chain: KeyChain, num_blocks: int) -> list[Node] | None:
        """Nodes of a hit of exactly `num_blocks` blocks, without another search if `find` just found it."""
        if self._last_hit is not None and self._last_hit[0] is chain and len(self._last_hit[1]) == num_blocks:
            return self._last_hit[1]
        nodes = self.find(chain, num_blocks)
        return nodes if len(nodes) == num_blocks else None

    def publish(self, seq: CacheSequence, deadlines: Mapping[int, float] | None = None) -> None:
        """Make the full blocks findable whose tokens are known, up to a key that names other content.

        deadlines: of block positions whose content is older than this and may be served until then only.
        """
        block_size = self._groups[0].block_size
        full = min(seq.num_computed // block_size, len(seq.chain.keys))
        if full > seq.num_published:
            self.expire()
            now = self.now()
        nodes: list[Node] = []
        while seq.num_published < full and seq.tip is not None:
            position = seq.num_published
            node = None
            if seq.tip.live:
                node = self.index.child(
                    seq.tip,
                    seq.chain.keys[position],
                    seq.chain.contents[position],
                    hides=seq.chain.hides(position),
                )
            if node is not None:
                limit = math.inf if deadlines is None else deadlines.get(position, math.inf)
                self._settle(seq, position, node, now, limit, loaded=deadlines is not None)
                nodes.append(node)
                seq.num_published += 1
            seq.tip = node
        for node in reversed(
            nodes
        ):  # not before: what comes after hangs on nodes that no group has blocks of
            self.index.prune(node)

    def used(self, group: CacheGroup, blocks: Sequence[int], *, slipped: bool = False) -> None:
        """Note that these published blocks have no holder from now on.

        slipped: they left the window of a running sequence; noted where all who use them have that window.
        """
        now = self.now()
        published = group.nodes
        if group.window is not None or self.index.gaps:
            for block in blocks:
                node = published[block]
                if node is not None and (group.window is not None or node.hides):
                    group.mark_slipped(node, slipped, now)
        keys = [node.key for block in blocks if (node := published[block]) is not None]
        group.policy.touch(keys, now)
        if self.watcher is not None and keys:
            self.watcher.released(keys, group.number)

    def take_block(self, group: CacheGroup) -> int:
        """A block with one holder, a free one or a victim's. Raises IntegrityError if there is neither."""
        block = group.pool.allocate()
        if block is None:
            self._evict_one(group)
            block = group.pool.allocate()
        if block is None:
            raise IntegrityError(
                f"group {group.number}: none of {group.pool.num_cached} cached blocks can be evicted"
            )
        return block

    def expire(self) -> int:
        """Forget content whose deadline has come, and what is after it; returns how many blocks that were."""
        before = sum(group.evictions["expired"] for group in self._groups)
        now = self._clock()
        for group in self._groups:
            for key in group.policy.expired(now):
                node = self.index.get(key)
                if node is not None:
                    self._drop(node, ["expired"] * len(self._groups))
        return sum(group.evictions["expired"] for group in self._groups) - before

    def forget(self, key: bytes) -> int:
        """Forget content that turned out wrong, and all after it; returns how many blocks that were."""
        node = self.index.get(key)
        if node is None:
            return 0
        before = sum(group.evictions["wrong"] for group in self._groups)
        self._drop(node, ["wrong"] * len(self._groups))
        return sum(group.evictions["wrong"] for group in self._groups) - before

    def reset(self) -> None:
        """Forget all content, and let nothing be published after content from before."""
        for node in list(self.index):
            for group in self._groups:
                self._forget(group, node, "reset")
        self.index.clear()

    def _settle(
        self, seq: CacheSequence, position: int, node: Node, now: float, limit: float, *, loaded: bool
    ) -> None:
        """Publish the blocks of one position in each group, or take those that are there."""
        if node.empty:
            node.deadline = min(limit, now + seq.ttl if seq.ttl is not None else math.inf)
        for group, table in zip(self._groups, seq.tables, strict=True):
            own, there = table[position], node.blocks[group.number]
            if own == NO_BLOCK:
                continue
            if there == NO_BLOCK:
                self._publish_block(group, own, node, _meta(seq, group, position, node, now), loaded=loaded)
            else:
                group.pool.retain([there])
                table[position] = there
                group.merged += 1
                group.pool.release([own])

    def _publish_block(self, group: CacheGroup, block: int, node: Node, meta: Meta, *, loaded: bool) -> None:
        """Make a held block findable as the content of `node`."""
        group.publish(block, node, meta)
        if self.on_publish is not None:
            self.on_publish(node.key, group.number, block, meta)
        if self.watcher is not None:
            self.watcher.published(node.key, group.number, meta, loaded=loaded)

    def _evict_one(self, group: CacheGroup) -> None:
        keys = group.policy.victims(1, self._held[group.number], self._clock())
        for key in keys or self._behind_the_held(group):
            node = self.index.get(key)
            if node is None:
                raise IntegrityError(f"group {group.number}: the policy chose a key that cannot be found")
            if group.window is None and not node.hides:
                self._drop_unreachable(node, group)
            else:
                self._forget(group, node, "space")
                self.index.prune(node)

    def _behind_the_held(self, group: CacheGroup) -> list[bytes]:
        """A cached block that the policy keeps for one after it, whose holder sees only that one any more."""
        idle = (node for block, node in enumerate(group.nodes) if node and not group.pool.refs[block])
        return [node.key for node in islice(idle, 1)]

    def _drop_unreachable(self, top: Node, evicted: CacheGroup) -> None:
        """Forget the block of a node that is evicted, and what no hit can reach without it, last first."""
        for node in reversed(self.index.subtree(top, hiding=False)):
            for group in self._groups:
                if node is top and group is evicted:
                    self._forget(group, node, "space")
                elif node is top or not group.pool.refs[node.blocks[group.number]]:
                    self._forget(group, node, "unreachable")
            self.index.prune(node)

    def _drop(self, top: Node, reasons: Sequence[EvictReason]) -> None:
        """Forget all blocks of a node and of those after it, last first."""
        for node in reversed(self.index.subtree(top)):
            for group, reason in zip(self._groups, reasons, strict=True):
                self._forget(group, node, reason)
            self.index.prune(node)

    def _forget(self, group: CacheGroup, node: Node, reason: EvictReason) -> None:
        meta = group.forget(node, reason)
        self._last_hit = None
        if meta is not None and self.on_evict is not None:
            self.on_evict(node.key, group.number, meta, reason)
        if meta is not None and self.watcher is not None:
            self.watcher.evicted(node.key, group.number, meta, reason)


def _meta(seq: CacheSequence, group: CacheGroup, position: int, node: Node, now: float) -> Meta:
    end = (position + 1) * group.block_size
    return Meta(
        parent=b"" if node.hides else seq.chain.parent(position),
        group=group.number,
        depth=position,
        bytes=group.pool.layout.payload_bytes,
        priority=seq.priority,
        born=now,
        deadline=node.deadline,
        origin="prompt" if end <= seq.prompt_tokens else "answer",
        segment=seq.chain.segment(position),
        spread=seq.spread,
    )
