"""How quick the disk is before anything was loaded: some of what lies there is read once."""

from __future__ import annotations

import time

from kvstrata.tiers.disk.geometry import runs
from kvstrata.tiers.disk.index import Entry
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.disk.store import DiskStore

_MOST_BYTES = 8 << 20  # that are read at once: enough to tell the bandwidth from the latency


def time_reads(store: DiskStore) -> list[tuple[int, float]]:
    """Bytes and seconds of reading the first record and the longest run of neighbours, as they lie in a file.

    Empty where the tier has no records of its model. Their content is not looked at. Raises OSError.
    """
    with store.lock:
        held: dict[SlotFile, list[Entry]] = {}
        for entry in store.index.entries():
            held.setdefault(entry.file, []).append(entry)
        if not held:
            return []
        file, entries = max(held.items(), key=lambda item: len(item[1]) * item[0].geometry.payload_bytes)
        for entry in entries:
            store.index.hold(entry)
    try:
        most = max(1, _MOST_BYTES // file.geometry.stride)
        found = runs(sorted(entry.slot for entry in entries), most)
        longest = max(found, key=lambda run: run[1])
        return [_timed(file, first, count) for first, count in ((found[0][0], 1), longest)]
    finally:
        store.release(entries)


def _timed(file: SlotFile, first: int, count: int) -> tuple[int, float]:
    """Of one read."""
    memory = memoryview(bytearray(count * file.geometry.payload_bytes))
    size = file.geometry.payload_bytes
    begin = time.perf_counter()
    with file.reading() as fd:
        file.read_payloads(fd, first, [memory[i * size : (i + 1) * size] for i in range(count)])
    return len(memory), time.perf_counter() - begin
