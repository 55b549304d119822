"""Loading: from the index to verified bytes in the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from kvstrata.tiers.disk.index import Entry
from kvstrata.tiers.disk.pieces import Gathered, Piece, cut, done, start
from kvstrata.tiers.disk.store import DiskStore
from kvstrata.tiers.record import RecordHeader, check_identity, check_payload, decode_header
from kvstrata.tiers.tier import Identity, Loaded, MissReason


class Reader:
    """Batched loads of a store. Slots are held from the look-up on, so nobody overwrites what is read."""

    def __init__(self, store: DiskStore, threads: ThreadPoolExecutor) -> None:
        self._store = store
        self._threads = threads

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        """See `Tier.load`."""
        store = self._store
        begun = store.clocks.monotonic()
        if not store.enter("load"):
            return done([Loaded("closed")] * len(wanted))
        held, results = self._hold(wanted, into, begun)
        pieces = cut({position: (entry.file, entry.slot) for position, entry in held.items()})

        def finish(loaded: list[Loaded]) -> None:
            hits = [position for position, one in enumerate(loaded) if one.miss is None]
            with store.lock:
                store.totals.misses.update(one.miss for one in loaded if one.miss is not None)
                store.totals.loads += len(hits)
                store.totals.loaded_bytes += sum(len(into[position]) for position in hits)
                store.totals.load_seconds += store.clocks.monotonic() - begun
            store.leave("load")

        gathered = Gathered(results, len(pieces), finish)
        for file, first, positions in pieces:
            file.will_need(first, len(positions))
        start(self._threads, gathered, pieces, lambda piece: self._read(piece, held, wanted, into, results))
        return gathered.future

    def _hold(
        self, wanted: Sequence[Identity], into: Sequence[memoryview], now: float
    ) -> tuple[dict[int, Entry], list[Loaded]]:
        """The entries to read, held, by position; and results so far."""
        store = self._store
        results = [Loaded("absent")] * len(wanted)
        held: dict[int, Entry] = {}
        if not store.reads.allows():
            return held, [Loaded("io_error")] * len(wanted)
        with store.lock:
            for file in list(store.space.own.values()):
                if file.is_gone:
                    store.forget(file)
            for position, identity in enumerate(wanted):
                entry = store.index.get(identity.address)
                if entry is None:
                    continue
                if entry.meta.deadline <= now:
                    store.drop([entry], "expired")
                    results[position] = Loaded("expired")
                elif len(into[position]) != entry.file.geometry.payload_bytes:
                    results[position] = Loaded("length")
                else:
                    store.index.hold(entry)
                    held[position] = entry
        return held, results

    def _read(
        self,
        piece: Piece,
        held: dict[int, Entry],
        wanted: Sequence[Identity],
        into: Sequence[memoryview],
        results: list[Loaded],
    ) -> None:
        """Read and verify one piece, quarantine what is wrong, and let go of its slots."""
        file, first, positions = piece
        store = self._store
        entries = [held[position] for position in positions]
        try:
            payloads = [into[position] for position in positions]
            full = file.read_payloads(first, payloads)
            headers = file.read_headers(first, len(positions))
            outcomes = [
                self._verify(entry, headers[i], wanted[position], into[position])
                if i < min(full, len(headers))
                else "length"
                for i, (position, entry) in enumerate(zip(positions, entries, strict=True))
            ]
            store.reads.succeeded()
        except Exception as error:  # the device's, or a defect of ours: a miss either way, and told
            store.reads.failed(error)
            for position in positions:
                results[position] = Loaded("io_error")
            store.release(entries)
            return
        self._conclude(positions, entries, outcomes, results)

    def _verify(
        self, entry: Entry, raw: memoryview, wanted: Identity, payload: memoryview
    ) -> RecordHeader | MissReason:
        store = self._store
        header = decode_header(raw)
        if not isinstance(header, RecordHeader):
            return header
        size = entry.file.geometry.payload_bytes
        return (
            check_identity(header, store.context.fingerprint, wanted, size)
            or check_payload(header, raw, payload, store.options.signing_key)
            or header
        )

    def _conclude(
        self,
        positions: Sequence[int],
        entries: Sequence[Entry],
        outcomes: Sequence[RecordHeader | MissReason],
        results: list[Loaded],
    ) -> None:
        store = self._store
        now = store.clocks.monotonic()
        used = []
        for position, entry, outcome in zip(positions, entries, outcomes, strict=True):
            deadline = entry.meta.deadline
            if not isinstance(outcome, RecordHeader):
                results[position] = Loaded(outcome)
                store.quarantine(entry)
            elif deadline <= now:
                results[position] = Loaded("expired")
            else:
                used.append(entry)
                results[position] = Loaded(None, deadline, replace(outcome.meta, deadline=deadline))
        with store.lock:
            store.index.touch(used, now)
        store.release(entries)
