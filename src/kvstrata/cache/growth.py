"""How a sequence's tables grow and shrink in one layer group: shared tails, windows, blocks from a tier."""

from __future__ import annotations

from kvstrata.cache.contents import Contents
from kvstrata.cache.group import CacheGroup
from kvstrata.cache.index import NO_BLOCK
from kvstrata.cache.table import CacheSequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return -(-num_tokens // block_size)


def shared_tail(seq: CacheSequence, group: CacheGroup) -> int | None:
    """The block that will be written next, if it is there and not the sequence's own to write."""
    position = seq.num_computed // group.block_size
    table = seq.tables[group.number]
    if position >= len(table):
        return None
    block = table[position]
    return block if group.pool.refs[block] > 1 or group.nodes[block] is not None else None


def copy_tail(contents: Contents, seq: CacheSequence, group: CacheGroup, shared: int) -> None:
    """Give the sequence a copy of its own of the block that it will write next."""
    own = contents.take_block(group)
    group.pool.copy_block(shared, own)
    group.copies += 1
    seq.tables[group.number][seq.num_computed // group.block_size] = own
    contents.used(group, group.pool.release([shared]))


def slip(contents: Contents, seq: CacheSequence, group: CacheGroup) -> None:
    """Let go of the blocks that the window has moved past."""
    table = seq.tables[group.number]
    hidden = seq.seen[group.number].hidden_blocks(seq.num_computed, group.block_size)
    if not hidden or hidden.stop <= seq.slipped[group.number]:
        return
    start = max(hidden.start, seq.slipped[group.number])
    gone = [block for block in table[start : hidden.stop] if block != NO_BLOCK]
    table[start : hidden.stop] = [NO_BLOCK] * (hidden.stop - start)
    seq.slipped[group.number] = hidden.stop
    give_back(contents, seq, group, gone, slipped=True)


def shorten(contents: Contents, seq: CacheSequence, group: CacheGroup, num_blocks: int) -> None:
    """Give back the blocks of a table after the first `num_blocks`."""
    table = seq.tables[group.number]
    gone = [block for block in table[num_blocks:] if block != NO_BLOCK]
    del table[num_blocks:]
    give_back(contents, seq, group, gone, slipped=False)


def give_back(
    contents: Contents, seq: CacheSequence, group: CacheGroup, blocks: list[int], *, slipped: bool
) -> None:
    """Release blocks of a running sequence, and renew its reservation by as many as nobody else holds."""
    if not blocks:
        return
    before = group.unreserved
    contents.used(group, group.pool.release(blocks), slipped=slipped)
    table = seq.tables[group.number]
    remaining = max(0, blocks_for(seq.reserve_tokens, group.block_size) - len(table))
    seen = seq.seen[group.number]
    wanted = group.promise(seen, remaining, len(seq.blocks(group.number))) - seq.reserved[group.number]
    renewed = min(group.unreserved - before, max(0, wanted))
    seq.reserved[group.number] += renewed
    group.reserved += renewed


def place_for_load(
    contents: Contents, groups: tuple[CacheGroup, ...], seq: CacheSequence, num_blocks: int
) -> list[list[int]] | None:
    """Take blocks for content that comes from outside, up to `num_blocks`; positions taken, by group.

    Only those that the token after can see. None, with nothing changed, if the room is not
    there.
    """
    wanted: list[list[int]] = []
    for group, table in zip(groups, seq.tables, strict=True):
        visible = seq.seen[group.number].visible_blocks(num_blocks, group.block_size)
        wanted.append([position for position in visible if position >= len(table)])
        if len(wanted[-1]) - seq.reserved[group.number] > group.unreserved:
            return None
    for group, table, positions in zip(groups, seq.tables, wanted, strict=True):
        own = min(len(positions), seq.reserved[group.number])
        seq.reserved[group.number] -= own
        group.reserved -= own
        table.extend([NO_BLOCK] * (num_blocks - len(table)))
        for position in positions:
            table[position] = contents.take_block(group)
    return wanted
