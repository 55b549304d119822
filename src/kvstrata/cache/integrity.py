"""The invariants of the cache, proved from scratch: slow, for tests and for looking into a defect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvstrata.cache.group import CacheGroup
from kvstrata.cache.index import NO_BLOCK, PrefixIndex
from kvstrata.cache.table import CacheSequence
from kvstrata.errors import IntegrityError


def verify(groups: Collection[CacheGroup], index: PrefixIndex, sequences: Collection[CacheSequence]) -> None:
    """Raise IntegrityError for the first invariant that does not hold."""
    for group in groups:
        _verify_blocks(group, sequences)
        _verify_published(group, index)
        _verify_reservations(group, sequences)
    _verify_tree(groups, index)


def _require(holds: bool, group: CacheGroup, what: str) -> None:
    if not holds:
        raise IntegrityError(f"group {group.number}: {what}")


def _verify_blocks(group: CacheGroup, sequences: Collection[CacheSequence]) -> None:
    """Each block is free, cached or held, and has as many holders as tables and pins name it."""
    pool = group.pool
    holders: Counter[int] = Counter()
    for seq in sequences:
        blocks = seq.blocks(group.number).tolist()
        _require(len(set(blocks)) == len(blocks), group, "a table has a block twice")
        table = seq.tables[group.number]
        _require(
            [block for block in table if block != NO_BLOCK] == blocks,
            group,
            "a block is in a table before the window",
        )
        holders.update(blocks)
    free = set(pool.free_blocks)
    _require(len(free) == pool.num_free, group, "a block is free twice")
    cached = 0
    for block in range(pool.num_blocks):
        refs, kept = int(pool.refs[block]), bool(pool.kept[block])
        named = holders[block] + int(pool.pins[block])
        _require(refs == named, group, f"block {block} counts {refs} holders, {named} name it")
        _require(
            (block in free) == (refs == 0 and not kept), group, f"block {block} is free and in use, or lost"
        )
        cached += refs == 0 and kept
    _require(cached == pool.num_cached, group, f"{cached} blocks are cached, {pool.num_cached} counted")
    held = sum(1 for refs in pool.refs if refs > 0)
    _require(held == pool.num_held, group, f"{held} blocks are held, {pool.num_held} counted")


def _verify_published(group: CacheGroup, index: PrefixIndex) -> None:
    """Index, pool and policy know the same blocks."""
    known = {node.blocks[group.number]: node for node in index if node.blocks[group.number] != NO_BLOCK}
    for block, node in enumerate(group.nodes):
        _require(known.get(block) is node, group, f"block {block} and the index name different content")
        _require(
            bool(group.pool.kept[block]) == (node is not None),
            group,
            f"block {block} is kept for nothing",
        )
        _require((block in group.metas) == (node is not None), group, f"block {block} has meta for nothing")
        _require(node is None or node.key in group.policy, group, f"block {block} is unknown to the policy")
    _require(len(known) == len(group.policy), group, "the policy knows keys that cannot be found")


def _verify_reservations(group: CacheGroup, sequences: Collection[CacheSequence]) -> None:
    """What is promised is counted, not negative, and covered."""
    promised = [seq.reserved[group.number] for seq in sequences]
    _require(min(promised, default=0) >= 0, group, "a reservation is negative")
    _require(
        sum(promised) == group.reserved,
        group,
        f"{sum(promised)} blocks promised, {group.reserved} counted",
    )
    _require(group.unreserved >= 0, group, f"{group.reserved} blocks are promised, more than free and cached")


def _verify_tree(groups: Collection[CacheGroup], index: PrefixIndex) -> None:
    """Nodes hang together, and in full-attention groups what is after a block is there only with it.

    The latter as long as no retention was in use: its sequences let go of blocks and keep those after them.
    """
    for node in index:
        parent = node.parent
        linked = parent is not None and parent.live and parent.children.get(node.key) is node
        if not (linked and node.live and (node.children or not node.empty)):
            raise IntegrityError(f"the index node at depth {node.depth} is not where it belongs")
        for group in groups:
            if group.window is None and not index.gaps:
                block = node.blocks[group.number]
                _require(block != NO_BLOCK, group, f"found content at depth {node.depth} has no block")
                above = NO_BLOCK if parent is None or parent is index.root else parent.blocks[group.number]
                held = group.pool.refs[block] == 0 or above == NO_BLOCK or group.pool.refs[above] > 0
                _require(bool(held), group, f"block {block} is held without block {above} before it")
