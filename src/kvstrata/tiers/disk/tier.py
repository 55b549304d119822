"""The disk tier: blocks in a folder, found again by the next process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstrata.errors import ConfigError
from kvstrata.tiers.disk.files import Files, SystemFiles
from kvstrata.tiers.disk.folder import Folder
from kvstrata.tiers.disk.index import Entry
from kvstrata.tiers.disk.integrity import check_integrity
from kvstrata.tiers.disk.opening import check_size, open_files
from kvstrata.tiers.disk.options import DiskOptions
from kvstrata.tiers.disk.probing import time_reads
from kvstrata.tiers.disk.reading import Reader
from kvstrata.tiers.disk.store import DiskStore
from kvstrata.tiers.disk.upkeep import Upkeep
from kvstrata.tiers.disk.writing import Writer
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import Address, Identity, Loaded, Record, StoreContext, Stored, TierUsage
from kvstrata.tiers.url import TierUrl
from kvstrata.tiers.worker import step_back

MOST_THREADS = 4  # for reading, and as many for writing


class DiskTier:
    """A `Tier` in a folder; see there for its methods, and `DiskOptions` for its settings."""

    def __init__(
        self,
        options: DiskOptions,
        context: StoreContext,
        *,
        clocks: Clocks | None = None,
        files: Files | None = None,
        threads: int | None = None,
    ) -> None:
        """Open the folder, locked against other writers, and scan it.

        threads: for reading, and as many for writing. Raises ConfigError where the folder cannot be used,
        another process writes to it, or the cap is smaller than a block.
        """
        self.options = options
        folder = Folder(options.path, read_only=options.read_only)
        self._store = DiskStore(options, context, folder, clocks or Clocks(), files or SystemFiles())
        try:
            check_size(self._store)
            open_files(self._store)
        except OSError as error:
            self._store.close_files()
            raise ConfigError(f"disk tier {str(options.path)!r} cannot be read: {error.strerror}") from None
        except ConfigError:
            self._store.close_files()
            raise
        count = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._readers = ThreadPoolExecutor(max(2, count), "kvstrata-disk-read")
        self._checkers = ThreadPoolExecutor(count, "kvstrata-disk-check")
        self._writers = ThreadPoolExecutor(max(2, count), "kvstrata-disk-write", step_back)
        self._stream = ThreadPoolExecutor(1, "kvstrata-disk-stream")
        self._reader = Reader(self._store, self._readers, self._stream, self._checkers, count)
        self._writer = Writer(self._store, self._writers)
        self._upkeep = Upkeep(self._store)

    @classmethod
    def open(cls, url: TierUrl, context: StoreContext) -> DiskTier:
        """The tier that a `disk://` URL names. Raises ConfigError."""
        return cls(DiskOptions.from_url(url), context)

    @property
    def name(self) -> str:
        return "disk"

    @property
    def ttl(self) -> float:
        """Seconds that a block is served at most."""
        return self.options.ttl

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> list[bool]:
        store = self._store
        if store.closed or store.reads.is_open:
            return [False] * len(addresses)
        now = store.clocks.monotonic()
        with store.lock:
            return [store.present(address, now) is not None for address in addresses]

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        return self._reader.load(wanted, into)

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        return self._writer.store(records)

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        store = self._store
        now = store.clocks.monotonic()
        with store.lock:
            store.index.touch(self._present(addresses, now), now)

    def pin(self, addresses: Sequence[Address], deadline: float) -> list[bool]:
        store = self._store
        now = store.clocks.monotonic()
        found = []
        with store.lock:
            for address in addresses:
                entry = None if store.closed else store.present(address, now)
                found.append(entry is not None)
                if entry is not None:
                    store.index.pin(entry, deadline)
        return found

    def unpin(self, addresses: Sequence[Address]) -> None:
        store = self._store
        with store.lock:
            for entry in self._present(addresses, store.clocks.monotonic()):
                store.index.unpin(entry)

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> int:
        store = self._store
        with store.lock:
            if store.closed or store.options.read_only:
                return 0
            for address in addresses:
                store.writing.pop(address, None)  # what is being written is emptied instead of published
            entries = self._present(dict.fromkeys(addresses), store.clocks.monotonic())
            store.drop(entries, "deleted")
        return len(entries)

    def clear(self) -> None:
        store = self._store
        with store.lock:
            if not store.closed and not store.options.read_only:
                store.writing.clear()
                store.drop(store.index.entries(), "deleted")

    def probe(self) -> list[tuple[int, float]]:
        store = self._store
        if not store.enter("load"):
            return []
        try:
            return time_reads(store)
        except OSError as error:
            store.reads.failed(error)
            return []
        finally:
            store.leave("load")

    def usage(self) -> TierUsage:
        return self._store.usage()

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant does not hold; at a time of no requests."""
        check_integrity(self._store)

    def drain(self) -> None:
        self._store.wait("store")
        if self.options.sync != "none" and not self.options.read_only and not self._store.closed:
            self._store.sync()

    def close(self) -> None:
        store = self._store
        if not store.shut():
            return
        store.wait("store")
        store.wait("load")
        self._upkeep.stop()
        for threads in (self._stream, self._readers, self._checkers, self._writers):
            threads.shutdown()
        if not self.options.read_only:
            store.write_uses()
            if self.options.sync != "none":
                store.sync()
        store.close_files()

    def _present(self, addresses: Sequence[Address] | dict[Address, None], now: float) -> list[Entry]:
        found = (self._store.present(address, now) for address in addresses)
        return [entry for entry in found if entry is not None]
