"""Opening a disk tier: which records of ours the folder holds, and who else's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvstrata.cache.keys import salt_of
from kvstrata.errors import ConfigError
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES
from kvstrata.tiers.disk.index import Entry, name_of
from kvstrata.tiers.disk.scan import Use, read_uses, scan
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.disk.space import ForeignFiles
from kvstrata.tiers.disk.store import DiskStore
from kvstrata.tiers.record import RecordHeader
from kvstrata.tiers.tier import Address

_TICK = 1e-6  # seconds that make up a place in the order of what happened before this process


@dataclass(frozen=True)
class _Candidate:
    """A record that was found. use: what was noted of it later than in its header, if anything."""

    file: SlotFile
    slot: int
    header: RecordHeader
    use: Use | None

    @property
    def used(self) -> tuple[int, int]:
        """Place in the order of use: what has no note was written after all notes."""
        return (1, self.header.serial) if self.use is None else (0, self.use.order)


def check_size(store: DiskStore) -> None:
    """Raise ConfigError if the cap has no room for one block of each group."""
    groups = range(len(store.context.payload_bytes))
    least = OVERHEAD_BYTES + sum(store.geometry(group).charge(1) for group in groups)
    size = store.options.size
    if size is not None and size < least and not store.options.read_only:
        raise ConfigError(f"size is {size}; one block needs {least} bytes, so give at least that")


def open_files(store: DiskStore) -> None:
    """Find what is there, and bring it under the cap. Raises OSError where the folder cannot be read."""
    groups = {store.geometry(group).stem: group for group in range(len(store.context.payload_bytes))}
    candidates: list[_Candidate] = []
    write = not store.options.read_only
    for stem, geometry in store.folder.stems().items():
        if stem not in groups:
            foreign = ForeignFiles(geometry, tuple(store.folder.paths(stem)))
            foreign.measure(store.files)
            store.space.foreign.append(foreign)
            continue
        file = _open_slots(store, groups[stem], write=write)
        if file is not None:
            store.space.own[groups[stem]] = file
            candidates += _candidates(store, file)
    kept = _newest(candidates)
    now = store.clocks.monotonic()
    _admit(store, kept, now)
    if write:
        for file in store.space.own.values():
            file.settle({entry.slot for entry in store.index.entries() if entry.file is file})
        store.space.shrink_to_capacity(now)


def _open_slots(store: DiskStore, group: int, *, write: bool) -> SlotFile | None:
    """The files of a group; None where a reader finds them incomplete."""
    try:
        return SlotFile(store.folder.path, store.geometry(group), store.files, write=write)
    except FileNotFoundError:
        return None


def refresh(store: DiskStore) -> None:
    """For a reader beside a writer: take in what was written since. Raises OSError."""
    groups = {store.geometry(group).stem: group for group in range(len(store.context.payload_bytes))}
    for stem in store.folder.stems():
        group = groups.get(stem)
        if group is None:
            continue
        with store.lock:
            known = store.space.own.get(group)
            if known is not None and known.is_gone:
                store.forget(known)
                known = None
        file = known or _open_slots(store, group, write=False)
        if file is None:
            continue
        file.measure()
        found = _newest(_candidates(store, file))
        with store.lock:
            store.space.own[group] = file
            here = {(entry.slot, entry.serial) for entry in store.index.entries() if entry.file is file}
            there = {(candidate.slot, candidate.header.serial) for candidate in found}
            stale = [
                entry
                for entry in store.index.entries()
                if entry.file is file and (entry.slot, entry.serial) not in there
            ]
            store.drop(stale, "deleted")
            fresh = [item for item in found if (item.slot, item.header.serial) not in here]
            _admit(store, fresh, store.clocks.monotonic())


def _candidates(store: DiskStore, file: SlotFile) -> list[_Candidate]:
    uses = read_uses(file)
    found = []
    for slot, header, _ in scan(file):
        if isinstance(header, RecordHeader):
            use = uses.get(slot)
            same = use is not None and use.serial == header.serial
            found.append(_Candidate(file, slot, header, use if same else None))
        else:
            store.totals.misses[header] += 1
            store.space.evictions["quarantined"] += 1
    return found


def _newest(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """Of several records of one block the one written last, in order of use."""
    newest: dict[bytes, _Candidate] = {}
    for candidate in candidates:
        name = name_of(candidate.header.key, candidate.header.group)
        if name not in newest or newest[name].header.serial < candidate.header.serial:
            newest[name] = candidate
    return sorted(newest.values(), key=lambda candidate: candidate.used)


def _admit(store: DiskStore, ordered: list[_Candidate], now: float) -> None:
    """Put records into the index, as if written and used one after the other until now."""
    last_serial = max((candidate.header.serial for candidate in ordered), default=0)
    store.next_serial = max(store.next_serial, last_serial + 1)
    limit = now + store.options.ttl
    for place, candidate in enumerate(ordered):
        header, use = candidate.header, candidate.use
        persisted = math.inf if use is None else use.remaining
        deadline = min(limit, header.lifetime.deadline(store.clocks, persisted))
        if deadline <= now:
            store.space.evictions["expired"] += 1
            continue
        address = Address(header.key, header.group)
        if store.index.get(address) is None:
            born = now - _TICK * (last_serial - header.serial + 1)
            name, meta = store.index.policy_meta(header.key, header.meta(born, deadline))
            used = now - _TICK * (len(ordered) - place)
            owner = salt_of(header.extras)
            store.index.add(Entry(name, candidate.file, candidate.slot, header.serial, meta, owner, used))
