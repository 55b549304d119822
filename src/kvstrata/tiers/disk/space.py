"""The cap of a disk tier: every byte of every file in the folder counts, whoever's blocks it holds."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstrata.tiers.disk.files import Files
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.disk.index import DiskIndex, Entry
from kvstrata.tiers.disk.slots import SlotFile

GROWTH_PAUSE = 30.0  # seconds for which a full disk is not asked for more
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class ForeignFiles:
    """Files of another model, format or block size, which are the first to go. geometry: None if unknown."""

    geometry: Geometry | None
    paths: tuple[Path, ...]
    allocated: int = 0
    modified_ns: int = 0

    @property
    def records(self) -> int:
        """How many there are, at most: their headers are not looked at."""
        return 0 if self.geometry is None else self.allocated // self.geometry.stride

    def measure(self, files: Files) -> None:
        """Take note of what they take from the disk; nothing for those that are not there."""
        self.allocated = self.modified_ns = 0
        for path in self.paths:
            with suppress(OSError):
                fd = files.open(path, write=False, create=False)
                try:
                    state = files.state(fd)
                finally:
                    files.close(fd)
                self.allocated += state.allocated
                self.modified_ns = max(self.modified_ns, state.modified_ns)

    def shrink(self, files: Files, nbytes: int) -> None:
        """Cut off so many bytes of payloads, or remove all where no payload would be left. Raises OSError."""
        payloads = self.paths[1]
        left = 0
        if self.geometry is not None and payloads.exists():
            fd = files.open(payloads, write=True, create=False)
            try:
                slots = -(-files.state(fd).size // self.geometry.stride)
                left = max(0, slots - -(-nbytes // self.geometry.stride))
                if left:
                    files.truncate(fd, left * self.geometry.stride)
            finally:
                files.close(fd)
        if not left:
            for path in self.paths:
                files.unlink(path)
        self.measure(files)


class Space:
    """Room for records under the cap. All of it is called under the store's lock.

    own: the slot files of this tier by group; foreign: the others in the folder. on_full: told when the disk
    has no room although the cap would allow it.
    """

    def __init__(
        self,
        capacity: int | None,
        index: DiskIndex,
        files: Files,
        on_full: Callable[[OSError], None] = lambda _: None,
    ) -> None:
        self.capacity = capacity
        self.own: dict[int, SlotFile] = {}
        self.foreign: list[ForeignFiles] = []
        self.evictions: Counter[str] = Counter()
        self._index = index
        self._files = files
        self._on_full = on_full
        self._no_growth_until = float("-inf")

    @property
    def used(self) -> int:
        """Bytes that everything in the folder takes."""
        own = sum(file.charged for file in self.own.values())
        return OVERHEAD_BYTES + own + sum(foreign.allocated for foreign in self.foreign)

    def acquire(self, file: SlotFile, n: int, now: float) -> list[int]:
        """Up to `n` slots, as many as can be had: free ones, new ones, those of others, those of victims.

        Raises OSError where the disk fails otherwise than by being full.
        """
        self.release_expired(now)
        slots = file.take(n)
        try:
            self._fill(slots, file, n, now)
        except OSError:
            file.put_back(slots)
            raise
        return sorted(slots)

    def _fill(self, slots: list[int], file: SlotFile, n: int, now: float) -> None:
        asked_again = False
        while len(slots) < n:
            if not self._grow(file, n - len(slots), now):
                if not self._reclaim(file, n - len(slots), now):
                    return
                if not file.num_free and now < self._no_growth_until:
                    if asked_again:
                        return  # the disk is full for good: evicting more elsewhere would not help
                    asked_again = True
                    self._no_growth_until = now
            slots += file.take(n - len(slots))

    def release_expired(self, now: float) -> None:
        """Free the slots of what has expired."""
        self.evict(self._index.expired(now), "expired", None)

    def evict(self, entries: Iterable[Entry], reason: str, wanted_by: SlotFile | None) -> None:
        """Free the slots of entries that left the index, once nobody reads them.

        wanted_by: the file in which they will be written over at once; elsewhere they are emptied.
        """
        for entry in entries:
            self.evictions[reason] += 1
            if entry.readers == 0:
                self.free(entry, erase=entry.file is not wanted_by)

    def free(self, entry: Entry, *, erase: bool) -> None:
        """The slot of an entry that left the index and that nobody reads any more."""
        if entry.file is not self.own.get(entry.meta.group):
            return  # its files are gone
        if not entry.file.write:
            return
        if not erase:
            entry.file.put_back([entry.slot])
            return
        with suppress(OSError):  # it is free all the same, and whoever writes there will hear of the disk
            entry.file.erase([entry.slot])

    def shrink_to_capacity(self, now: float) -> None:
        """Evict what a lowered cap, or another process's files, leave no room for."""
        while self.capacity is not None and self.used > self.capacity:
            if self._reclaim_foreign(self.used - self.capacity):
                continue
            victims = self._index.victims(1, now)
            if not victims:
                return
            self.evict(victims, "space", None)

    def _grow(self, file: SlotFile, n: int, now: float) -> bool:
        if now < self._no_growth_until:
            return False
        room = 1 << 60 if self.capacity is None else self.capacity - self.used
        try:
            return room > 0 and file.grow(n, room)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._no_growth_until = now + GROWTH_PAUSE
            self._on_full(error)
            return False

    def _reclaim(self, file: SlotFile, n: int, now: float) -> bool:
        if now >= self._no_growth_until:  # what others give back is of use only to a file that can grow
            if self._reclaim_foreign(n * file.geometry.slot_bytes):
                return True
            others = [other for other in self.own.values() if other is not file and other.num_free]
            if any(other.give_back_free() for other in others):
                return True
        victims = self._index.victims(n, now)
        self.evict(victims, "space", file)
        return bool(victims)

    def _reclaim_foreign(self, nbytes: int) -> bool:
        for foreign in sorted(self.foreign, key=lambda foreign: foreign.modified_ns):
            before = foreign.allocated
            with suppress(OSError):
                foreign.shrink(self._files, nbytes)
            if foreign.allocated == 0:
                self.foreign.remove(foreign)
            if foreign.allocated < before:
                return True
        return False
