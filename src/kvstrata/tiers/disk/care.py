"""Looking after a store's folder without a model: what is in it, whether it is whole, and cleaning it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Self

from kvstrata.tiers.care import Cleaned, Progress, StoredRecord
from kvstrata.tiers.disk.files import Files, SystemFiles
from kvstrata.tiers.disk.folder import OVERHEAD_BYTES, Folder
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.disk.options import DiskOptions
from kvstrata.tiers.disk.scan import Found, Use, read_uses, scan
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.disk.space import ForeignFiles
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.record import RecordHeader, check_payload
from kvstrata.tiers.tier import MissReason


class StoreFolder:
    """All slot files of a folder, of whatever model; `close` it, or use it in a `with` statement."""

    def __init__(
        self,
        options: DiskOptions,
        *,
        write: bool = False,
        files: Files | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """Open a folder that holds a store, locked if it is to be written. Raises ConfigError."""
        self.options = options
        self._files = files or SystemFiles()
        self._clocks = clocks or Clocks()
        Folder(options.path, read_only=True).close()  # refuses a folder without a store
        self._folder = Folder(options.path, read_only=not write)
        self._slot_files: list[SlotFile] = []
        self._unknown: list[ForeignFiles] = []
        for stem, geometry in self._folder.stems().items():
            paths = tuple(self._folder.paths(stem))
            if geometry is not None and all(path.exists() for path in paths[:2]):
                self._slot_files.append(SlotFile(options.path, geometry, self._files, write=write))
            else:
                self._unknown.append(ForeignFiles(geometry, paths))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and let go of the lock."""
        for file in self._slot_files:
            file.close()
        self._folder.close()

    @property
    def geometries(self) -> list[Geometry]:
        """Of each model and group that has files here."""
        return [file.geometry for file in self._slot_files]

    @property
    def used_bytes(self) -> int:
        """What everything in the folder takes from the disk."""
        total = OVERHEAD_BYTES
        for stem in self._folder.stems():
            measured = ForeignFiles(None, tuple(self._folder.paths(stem)))
            measured.measure(self._files)
            total += measured.allocated
        return total

    def records(self, progress: Progress | None = None) -> Iterator[StoredRecord]:
        """Every slot that is not empty, by its header alone. Raises OSError."""
        for file, found in self._found(progress):
            yield self._record(file, found, {})

    def verify(self, progress: Progress | None = None) -> Iterator[StoredRecord]:
        """The same with payloads verified, and signatures where the options have a key. Raises OSError."""
        for record, _ in self.payloads(None, progress):
            yield record

    def payloads(
        self, geometry: Geometry | None, progress: Progress | None = None
    ) -> Iterator[tuple[StoredRecord, memoryview]]:
        """Verified slots of one model and group (None: of all) and their payloads, in memory that is theirs.

        Raises OSError.
        """
        uses: dict[int, Use] = {}
        current: SlotFile | None = None
        for file, found in self._found(progress, geometry):
            if file is not current:
                current, uses = file, read_uses(file)
            record = self._record(file, found, uses)
            payload = memoryview(bytearray(file.geometry.payload_bytes))
            fault = record.fault or self._fault(file, found, payload)
            if fault is not None:
                record = StoredRecord(record.geometry, record.slot, record.header, fault)
            yield record, payload

    def clean(
        self, unwanted: Callable[[StoredRecord], str | None], progress: Progress | None = None
    ) -> Cleaned:
        """Remove what is no record, what has expired and what `unwanted` has a reason for; free their room.

        Raises OSError.
        """
        cleaned = Cleaned(before=self.used_bytes)
        for unknown in self._unknown:
            cleaned.removed["unknown_file"] += 1
            for path in unknown.paths:
                self._files.unlink(path)
        kept: dict[Geometry, set[int]] = {file.geometry: set() for file in self._slot_files}
        for file, found in self._found(progress):
            record = self._record(file, found, {})
            reason = record.fault or ("expired" if record.remaining <= 0 else unwanted(record))
            if reason is None:
                kept[file.geometry].add(found.slot)
            else:
                cleaned.removed[reason] += 1
        for file in self._slot_files:
            file.settle(kept[file.geometry])
            file.sync()
            if not kept[file.geometry]:
                for path in self._folder.paths(file.geometry.stem):
                    self._files.unlink(path)
        cleaned.kept = sum(len(slots) for slots in kept.values())
        cleaned.after = self.used_bytes
        return cleaned

    def _found(
        self, progress: Progress | None, geometry: Geometry | None = None
    ) -> Iterator[tuple[SlotFile, Found]]:
        chosen = [file for file in self._slot_files if geometry in (None, file.geometry)]
        before, total = 0, sum(file.slots for file in chosen)
        for file in chosen:
            for found in scan(file):
                yield file, found
                if progress is not None:
                    progress(before + found.slot + 1, total)
            before += file.slots
        if progress is not None:
            progress(total, total)

    def _record(self, file: SlotFile, found: Found, uses: dict[int, Use]) -> StoredRecord:
        header = found.header
        if not isinstance(header, RecordHeader):
            return StoredRecord(file.geometry, found.slot, None, header)
        use = uses.get(found.slot)
        persisted = use.remaining if use is not None and use.serial == header.serial else math.inf
        remaining = header.lifetime.deadline(self._clocks, persisted) - self._clocks.monotonic()
        age = self._clocks.wall() - header.written
        return StoredRecord(file.geometry, found.slot, header, None, age, remaining)

    def _fault(self, file: SlotFile, found: Found, payload: memoryview) -> MissReason | None:
        """What is wrong with the payload of a good header, if anything."""
        assert isinstance(found.header, RecordHeader)
        with file.reading() as fd:
            if not file.read_payloads(fd, found.slot, [payload], check_pad=True):
                return "length"
        return check_payload(found.header, found.raw, payload, self.options.signing_key)
