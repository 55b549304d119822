"""The KV cache as the engine sees it: match a prompt, open a sequence, grow, commit, fork, release.

Life of a sequence: `match` tells what is there, `open` takes it and reserves the rest, and then, step by
step, `grow` provides blocks before the forward pass and `commit` tells what it computed; `release` gives
all back. A sequence that is preempted is released and opened again later. One thread calls all this.

Three rules keep it simple. Content is published in order, under the block before it, so what can be found
is a tree. Where a block's content is there already when it is committed, the sequence takes the one that is
there and gives up its own, so whoever holds a block of a full-attention group holds those before it that it
still sees, and every cached block can be evicted. And what is promised never exceeds free and cached blocks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from kvstrata.cache.contents import Contents, OnEvict, OnPublish, Watcher
from kvstrata.cache.group import CacheGroup
from kvstrata.cache.growth import blocks_for, copy_tail, place_for_load, shared_tail, shorten, slip
from kvstrata.cache.index import NO_BLOCK
from kvstrata.cache.integrity import verify
from kvstrata.cache.keys import KEY_BYTES, Extras, KeyChain, TokenIds
from kvstrata.cache.layout import BlockLayout, check_layouts
from kvstrata.cache.lifetimes import Lifetimes, check_ttl, shortened
from kvstrata.cache.policy import Meta
from kvstrata.cache.pool import BlockPool
from kvstrata.cache.retention import FULL, Retention
from kvstrata.cache.stats import CacheStats, collect
from kvstrata.cache.table import CacheSequence, held_blocks
from kvstrata.errors import ConfigError


class KVCache:
    """Blocks of all layer groups of one model, shared by content.

    layouts, num_blocks: one for each layer group, in the order of the engine's groups. fingerprint: of the
    model, the parent of all first blocks. max_chunk: most tokens of one sequence in one step. policy:
    `lru`, `lrfu`, `fifo` or `ttl`. ttl: seconds that published content is served (None: for ever), unless its
    sequence says otherwise. clock: seconds, monotonic. digest_bytes: length of keys; tests shorten it.

    on_evict(key, group, meta, reason) is called when a block can no longer be found, before its memory is
    used again; on_publish(key, group, block, meta) when it can be.

    Raises ConfigError for settings that cannot be used.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        num_blocks: Sequence[int],
        *,
        fingerprint: bytes,
        device: torch.device | str,
        max_chunk: int,
        policy: str = "lru",
        ttl: float | None = None,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
        digest_bytes: int = KEY_BYTES,
        on_evict: OnEvict | None = None,
        on_publish: OnPublish | None = None,
    ) -> None:
        check_layouts(layouts, num_blocks)
        check_ttl(ttl)
        if max_chunk < 1:
            raise ConfigError(f"max_chunk is {max_chunk}: a step computes at least 1 token")
        if not 1 <= digest_bytes <= KEY_BYTES:
            raise ConfigError(f"digest_bytes is {digest_bytes}: keys have 1 to {KEY_BYTES} bytes")
        if policy == "ttl" and ttl is None:
            raise ConfigError("policy 'ttl' needs ttl, the seconds that content is served")
        self.block_size = layouts[0].block_size
        self.fingerprint = fingerprint
        self.prefix_caching = prefix_caching
        self.policy = policy
        self.groups = tuple(
            CacheGroup(number, layout, blocks, device=device, max_chunk=max_chunk, policy=policy)
            for number, (layout, blocks) in enumerate(zip(layouts, num_blocks, strict=True))
        )
        self.pools: tuple[BlockPool, ...] = tuple(group.pool for group in self.groups)
        self._contents = Contents(self.groups, fingerprint, clock, on_evict, on_publish)
        self.lifetimes = Lifetimes(self._contents, self.groups)
        self._sequences: dict[int, CacheSequence] = {}
        self._ttl = ttl
        self.clock = clock
        self._digest_bytes = digest_bytes

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest single sequence that sees all of them and fits in all groups."""
        return self.capacity(FULL)

    def capacity(self, retention: Retention) -> int:
        """Tokens of the longest single sequence that fits in all groups; sys.maxsize if any does."""
        limits = (group.capacity_blocks(retention) for group in self.groups)
        return min((limit * self.block_size for limit in limits if limit is not None), default=sys.maxsize)

    def chain(self, token_ids: TokenIds, extras: Extras) -> KeyChain:
        """The keys of a sequence of tokens under this cache's model."""
        chain = KeyChain(self.fingerprint, self.block_size, extras, self._digest_bytes)
        chain.extend(token_ids)
        return chain

    def match(self, chain: KeyChain, limit: int) -> int:
        """Tokens of the longest hit that all groups satisfy: a multiple of block_size, at most `limit`.

        A hit of n needs in each group the blocks that the token at n can see. Changes nothing.
        """
        if not self.prefix_caching:
            return 0
        return len(self._contents.find(chain, max(0, limit) // self.block_size)) * self.block_size

    def open(
        self,
        chain: KeyChain,
        hit_tokens: int,
        reserve_tokens: int,
        *,
        priority: int = 0,
        ttl: float | None = None,
        prompt_tokens: int | None = None,
        spread: float = 0.0,
    ) -> CacheSequence | None:
        """Start a sequence on the blocks of a hit, and reserve room in all groups to grow to a length.

        reserve_tokens: that length. prompt_tokens: where the answer begins, by default at the chain's end.
        spread: share of times to live to take off, here and below, so that what is set together does not
        expire together.
        Returns None, with nothing changed, if the room is not there, or if the hit that `match` told is not
        there any more. Raises ValueError if `hit_tokens` is not a multiple of block_size or the chain is not
        of this cache, ConfigError if `ttl` is not positive.
        """
        check_ttl(ttl)
        if (chain.root, chain.block_size) != (self.fingerprint, self.block_size):
            raise ValueError("the chain is of another model or block size: make it by this cache's chain()")
        self._check_whole("hit_tokens", hit_tokens)
        nodes = self._contents.take_hit(chain, hit_tokens // self.block_size)
        if nodes is None:
            return None
        total = max(self._blocks(reserve_tokens), len(nodes))
        tables, held, promises, slipped = [], [], [], []
        seen = tuple(chain.retention.within(group.window) for group in self.groups)
        for group, own in zip(self.groups, seen, strict=True):
            table = group.blocks_of(nodes)
            hidden = own.hidden_blocks(hit_tokens, self.block_size)
            table[hidden.start : hidden.stop] = [NO_BLOCK] * len(hidden)
            blocks = held_blocks(table)
            promise = group.promise(own, total - len(nodes), len(blocks))
            if promise > group.unreserved - group.pool.idle_among(blocks):
                return None
            tables.append(table)
            held.append(blocks)
            promises.append(promise)
            slipped.append(hidden.stop if hidden else 0)
        seq = CacheSequence(
            chain=chain,
            tables=tuple(tables),
            num_computed=hit_tokens,
            prompt_tokens=len(chain) if prompt_tokens is None else prompt_tokens,
            reserve_tokens=reserve_tokens,
            reserved=promises,
            priority=priority,
            ttl=shortened(self._ttl if ttl is None else ttl, spread),
            spread=spread,
            tip=nodes[-1] if nodes else self._contents.index.root,
            num_published=len(nodes),
            seen=seen,
            slipped=slipped,
        )
        for group, blocks, promise in zip(self.groups, held, promises, strict=True):
            group.pool.retain(blocks)
            group.reserved += promise
        self._sequences[id(seq)] = seq
        if nodes and self._contents.watcher is not None:
            self._contents.watcher.hit(chain, len(nodes))
        return seq

    def grow(self, seq: CacheSequence, num_tokens: int) -> bool:
        """Make every table cover `num_tokens`, and what will be written next the sequence's own.

        Blocks come from what it has reserved, then from what nobody has; where none is free the policy's
        victims make room. The block of position `num_computed` is copied first if another holds it or it
        can be found. Returns False, with nothing changed, if the room is not there in one of the groups.
        """
        self._check_open(seq)
        self.expire()
        target, writes = self._blocks(num_tokens), num_tokens > seq.num_computed
        plan = []
        for group, table in zip(self.groups, seq.tables, strict=True):
            copied = shared_tail(seq, group) if writes else None
            need = max(0, target - len(table)) + (copied is not None)
            own = min(need, seq.reserved[group.number])
            if need - own > group.unreserved:
                return False
            if need:
                plan.append((group, table, own, copied))
        for group, table, own, copied in plan:
            seq.reserved[group.number] -= own
            group.reserved -= own
            if copied is not None:
                copy_tail(self._contents, seq, group, copied)
            for _ in range(target - len(table)):
                table.append(self._contents.take_block(group))
        return True

    def commit(self, seq: CacheSequence, num_computed: int) -> None:
        """Tell that the pool holds K and V of the first `num_computed` tokens.

        Blocks that are full now can be found from here on; where their content was there already, the table
        points to that and the own block is free. Blocks that no query at `num_computed` or later can see
        leave the tables. Raises ValueError for fewer tokens than before or more than the
        tables cover.
        """
        self._check_open(seq)
        covered = min(len(table) for table in seq.tables) * self.block_size
        if not seq.num_computed <= num_computed <= covered:
            raise ValueError(
                f"num_computed is {num_computed}: it can go from {seq.num_computed} to {covered}"
            )
        self._advance(seq, num_computed)

    def place_for_load(self, seq: CacheSequence, num_tokens: int) -> list[list[int]] | None:
        """Take blocks for content that comes from a tier, up to a length: block positions taken, by group.

        Only the blocks that the token at `num_tokens` can see. The sequence does not grow until
        `commit_loaded`. None, with nothing changed, if the room is not there. Raises ValueError if
        `num_tokens` is not a multiple of block_size.
        """
        self._check_open(seq)
        self._check_whole("num_tokens", num_tokens)
        self.expire()
        return place_for_load(self._contents, self.groups, seq, num_tokens // self.block_size)

    def commit_loaded(
        self, seq: CacheSequence, num_tokens: int, deadlines: Mapping[int, float] | None = None
    ) -> None:
        """Tell that the blocks taken by `place_for_load` hold their content up to `num_tokens`.

        The blocks after that are given back. deadlines: from when on a block position's content is not
        served. Raises ValueError if `num_tokens` is not a multiple of block_size, or fewer than computed.
        """
        self._check_open(seq)
        self._check_whole("num_tokens", num_tokens)
        if num_tokens < seq.num_computed:
            raise ValueError(f"num_tokens is {num_tokens}: {seq.num_computed} are computed already")
        for group in self.groups:
            shorten(self._contents, seq, group, num_tokens // self.block_size)
        self._advance(seq, num_tokens, deadlines)

    def _advance(
        self, seq: CacheSequence, num_computed: int, deadlines: Mapping[int, float] | None = None
    ) -> None:
        seq.num_computed = num_computed
        if self.prefix_caching and seq.tip is not None:
            self._contents.publish(seq, deadlines)
        for group in self.groups:
            slip(self._contents, seq, group)

    def fork(self, seq: CacheSequence) -> CacheSequence:
        """A second sequence over all that this one has computed, without a reservation of its own."""
        self._check_open(seq)
        covered = self._blocks(seq.num_computed)
        child = CacheSequence(
            chain=seq.chain.copy(),
            tables=tuple(table[:covered] for table in seq.tables),
            num_computed=seq.num_computed,
            prompt_tokens=seq.prompt_tokens,
            reserve_tokens=0,
            reserved=[0] * len(self.groups),
            priority=seq.priority,
            ttl=seq.ttl,
            spread=seq.spread,
            tip=seq.tip,
            num_published=seq.num_published,
            seen=seq.seen,
            slipped=seq.slipped.copy(),
        )
        for group in self.groups:
            group.pool.retain(child.blocks(group.number))
        self._sequences[id(child)] = child
        return child

    def truncate(self, seq: CacheSequence, num_tokens: int) -> None:
        """Give back the blocks after `num_tokens`, to the reservation.

        Raises ValueError below `num_computed`.
        """
        self._check_open(seq)
        if num_tokens < seq.num_computed:
            raise ValueError(
                f"num_tokens is {num_tokens}: {seq.num_computed} are computed, keep at least these"
            )
        for group in self.groups:
            shorten(self._contents, seq, group, self._blocks(num_tokens))

    def release(self, seq: CacheSequence) -> None:
        """Give back all blocks; those that can be found stay until evicted. Does nothing the second time."""
        if seq.released:
            return
        self._check_open(seq)
        for group, table in zip(self.groups, seq.tables, strict=True):
            group.reserved -= seq.reserved[group.number]
            seq.reserved[group.number] = 0
            self._contents.used(group, group.pool.release(seq.blocks(group.number)))
            table.clear()
            seq.slipped[group.number] = 0
        seq.released = True
        seq.tip = None
        del self._sequences[id(seq)]

    def pin(self, key: bytes, group: int) -> list[int] | None:
        """Hold a published block for a reader outside the block tables, until `unpin` of what this returns.

        In a full-attention group those before it are held as well, unless its content depends on a retention;
        the block itself is the last. None if it cannot be found, or if what is promised would not be covered.
        """
        node = self._contents.index.get(key)
        if node is None or node.blocks[group] == NO_BLOCK:
            return None
        blocks = [node.blocks[group]]
        chained = self.groups[group].window is None and not node.hides
        while chained and node.parent is not None and node.parent.parent is not None:
            node = node.parent
            if node.blocks[group] != NO_BLOCK:
                blocks.append(node.blocks[group])
        blocks.reverse()
        if self.pools[group].idle_among(blocks) > self.groups[group].unreserved:
            return None
        self.pools[group].pin(blocks)
        return blocks

    def unpin(self, group: int, blocks: list[int]) -> None:
        """Undo one `pin`."""
        self._contents.used(self.groups[group], self.pools[group].unpin(blocks))

    def watch_published(self, on_publish: OnPublish | None) -> None:
        """Call `on_publish(key, group, block, meta)` from now on when a block can be found."""
        self._contents.on_publish = on_publish

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` from now on what blocks go through, in the place of the one before."""
        self._contents.watcher = watcher

    def block_of(self, key: bytes, group: int) -> int | None:
        """The block that holds the content of a key in a group; None if it cannot be found."""
        node = self._contents.index.get(key)
        return None if node is None or node.blocks[group] == NO_BLOCK else node.blocks[group]

    def meta_of(self, key: bytes, group: int) -> Meta | None:
        """What the policy was told of a block that can be found."""
        block = self.block_of(key, group)
        return None if block is None else self.groups[group].metas[block]

    def content_of(self, key: bytes) -> bytes | None:
        """What `KeyChain.contents` has of a key that can be found."""
        node = self._contents.index.get(key)
        return None if node is None else node.content

    def parent_of(self, key: bytes) -> bytes | None:
        """The key before a key that can be found: of a first block the fingerprint."""
        node = self._contents.index.get(key)
        return None if node is None or node.parent is None else node.parent.key

    def mark_dirty(self, key: bytes, group: int, dirty: bool) -> None:
        """Tell whether a block's content would be lost with it, so that others are evicted before."""
        node = self._contents.index.get(key)
        if node is not None:
            self.groups[group].mark_dirty(node, dirty, self._contents.now())

    def forget(self, key: bytes) -> int:
        """Let nobody find the content of a key and what comes after it; returns how many blocks that were."""
        return self._contents.forget(key)

    def reset(self) -> None:
        """Forget everything cached: sequences go on, but nothing computed so far will be found."""
        self._contents.reset()

    def expire(self) -> int:
        """Drop what has expired by the clock; returns the number of blocks that can no longer be found."""
        return self._contents.expire()

    def check_integrity(self) -> None:
        """Raise IntegrityError, saying what, if an invariant does not hold."""
        verify(self.groups, self._contents.index, self._sequences.values())

    def stats(self) -> CacheStats:
        """Counts at this moment."""
        return collect(self.groups, self._contents.index, self._sequences.values())

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def _check_whole(self, name: str, num_tokens: int) -> None:
        if num_tokens % self.block_size:
            raise ValueError(f"{name} is {num_tokens}: give a multiple of the block size, {self.block_size}")

    def _check_open(self, seq: CacheSequence) -> None:
        if self._sequences.get(id(seq)) is not seq:
            raise ValueError("the sequence was released, or belongs to another cache: open one here")
