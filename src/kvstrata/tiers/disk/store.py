"""The state of an open disk tier, and the changes to it that reading, writing and upkeep have in common."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from kvstrata.tiers.disk.device import Device
from kvstrata.tiers.disk.files import Files
from kvstrata.tiers.disk.folder import Folder
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.disk.index import DiskIndex, Entry
from kvstrata.tiers.disk.options import DiskOptions
from kvstrata.tiers.disk.scan import Use, encode_uses
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.disk.space import Space
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import Address, StoreContext, TierUsage


class DiskStore:
    """What the parts of a disk tier share. `lock` guards index, space, writing, totals and next_serial.

    writing: blocks on their way to the disk, by a token of who writes them. next_serial: of the next record.
    """

    def __init__(
        self, options: DiskOptions, context: StoreContext, folder: Folder, clocks: Clocks, files: Files
    ) -> None:
        self.options = options
        self.context = context
        self.folder = folder
        self.clocks = clocks
        self.files = files
        self.lock = threading.Lock()
        self._idle = threading.Condition(self.lock)
        self._under_way: Counter[str] = Counter()
        self._closed = False
        chained = context.chained or (True,) * len(context.payload_bytes)
        self.index = DiskIndex(options.policy, chained, by_owner=options.quota is not None)
        self.writing: dict[Address, object] = {}
        self.next_serial = 1
        self.reads = Device(f"reading from disk tier {str(options.path)!r}", clocks.monotonic)
        self.writes = Device(f"writing to disk tier {str(options.path)!r}", clocks.monotonic)
        self.space = Space(options.size, self.index, files, self.writes.mention)
        self.totals = TierUsage()
        self._retired: list[SlotFile] = []  # of removed files; readers may still be in them

    def enter(self, kind: Literal["load", "store"], most: int | None = None) -> bool:
        """A request begins; false where the tier is closed or has `most` requests of that kind already."""
        with self.lock:
            if self._closed or (most is not None and self._under_way[kind] >= most):
                return False
            self._under_way[kind] += 1
            return True

    def leave(self, kind: Literal["load", "store"]) -> None:
        """It is done with."""
        with self.lock:
            self._under_way[kind] -= 1
            if not self._under_way[kind]:
                self._idle.notify_all()

    def wait(self, kind: Literal["load", "store"]) -> None:
        """Return when no request of that kind is under way."""
        with self.lock:
            self._idle.wait_for(lambda: not self._under_way[kind])

    @property
    def closed(self) -> bool:
        return self._closed

    def shut(self) -> bool:
        """Let no further request begin; false where that was done before."""
        with self.lock:
            was_closed, self._closed = self._closed, True
        return not was_closed

    def geometry(self, group: int) -> Geometry:
        """Of the slots of a layer group."""
        context = self.context
        return Geometry(context.fingerprint, group, context.block_size, context.payload_bytes[group])

    def present(self, address: Address, now: float) -> Entry | None:
        """The entry of a block that has not expired; one that has is dropped. Under the lock."""
        entry = self.index.get(address)
        if entry is not None and entry.meta.deadline <= now:
            self.drop([entry], "expired")
            return None
        return entry

    def drop(self, entries: Iterable[Entry], reason: str) -> None:
        """Remove entries and empty their slots. Under the lock."""
        entries = list(entries)
        for entry in entries:
            self.index.drop(entry)
        self.space.evict(entries, reason, None)

    def file_for_writing(self, group: int) -> SlotFile:
        """The slot file of a group, anew if someone removed it. Under the lock. Raises OSError."""
        file = self.space.own.get(group)
        if file is not None and file.is_gone:
            self.forget(file)
            file = None
        if file is None:
            self.folder.check_held()
            file = SlotFile(self.folder.path, self.geometry(group), self.files, write=True)
            file.settle(set())
            self.space.own[group] = file
            if self.options.sync != "none":
                self.files.sync_folder(self.folder.path)
        return file

    def forget(self, file: SlotFile) -> None:
        """Someone removed this file: nothing in it is found any more. Under the lock."""
        self.space.own.pop(file.geometry.group)
        self._retired.append(file)
        gone = [entry for entry in self.index.entries() if entry.file is file]
        for entry in gone:
            self.index.drop(entry)
        self.space.evictions["deleted"] += len(gone)

    def release(self, entries: Iterable[Entry]) -> None:
        """Readers are done with these."""
        with self.lock:
            for entry in entries:
                if self.index.release(entry):
                    self.space.free(entry, erase=True)

    def quarantine(self, entry: Entry) -> None:
        """A record that does not verify: it is not found again, nor by the next process."""
        with self.lock:
            if not entry.gone:
                self.drop([entry], "quarantined")

    def sync(self) -> None:
        """Make all that was written durable; a failure is the writes' breaker's."""
        with self.lock:
            files = list(self.space.own.values())
        try:
            for file in files:
                file.sync()
        except OSError as error:
            self.writes.failed(error)

    def write_uses(self) -> None:
        """Note for the next process in what order records were used and what is left of their lives."""
        now = self.clocks.monotonic()
        with self.lock:
            ordered = sorted(self.index.entries(), key=lambda entry: (entry.used, entry.serial))
            files = [(file, file.slots) for file in self.space.own.values()]
        rows: dict[int, dict[int, Use]] = {file.geometry.group: {} for file, _ in files}
        for order, entry in enumerate(ordered):
            left = entry.meta.deadline - now
            if entry.file.geometry.group in rows:
                row = Use(entry.serial, order, left if left < math.inf else math.inf)
                rows[entry.file.geometry.group][entry.slot] = row
        for file, slots in files:
            with suppress(OSError):  # it is only a hint
                file.write_uses(encode_uses(slots, rows[file.geometry.group]))

    def usage(self) -> TierUsage:
        """Figures at this moment, of the caller's own."""
        with self.lock:
            foreign = sum(foreign.records for foreign in self.space.foreign)
            return replace(
                self.totals,
                used_bytes=self.space.used,
                capacity_bytes=self.space.capacity,
                records=len(self.index) + foreign,
                evictions=self.space.evictions.copy(),
                misses=self.totals.misses.copy(),
                drops=self.totals.drops.copy(),
                policy=self.options.policy,
            )

    def close_files(self) -> None:
        """Close everything; nothing is read or written any more."""
        with self.lock:
            for file in (*self.space.own.values(), *self._retired):
                file.close()
            self.folder.close()
