"""Loading: from the index to verified bytes in the caller's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvstrata.tiers.disk.index import Entry
from kvstrata.tiers.disk.pieces import Gathered, Piece, cut, done
from kvstrata.tiers.disk.store import DiskStore
from kvstrata.tiers.record import RecordHeader, check_identity, check_payload, decode_header
from kvstrata.tiers.tier import Identity, Loaded, MissReason


@dataclass(frozen=True)
class _Batch:
    """One request. held: entries to read, by position."""

    wanted: Sequence[Identity]
    into: Sequence[memoryview]
    held: dict[int, Entry]
    gathered: Gathered[Loaded]


class Reader:
    """Batched loads of a store. Slots are held from the look-up on, so nobody overwrites what is read."""

    def __init__(
        self,
        store: DiskStore,
        readers: ThreadPoolExecutor,
        stream: ThreadPoolExecutor,
        checkers: ThreadPoolExecutor,
        side_by_side: int,
    ) -> None:
        """readers: copy and verify what the system has in memory, `side_by_side` of them for one request.
        stream: one thread that reads from the disk; checkers: verify what it has read.
        """
        self._store = store
        self._readers = readers
        self._stream = stream
        self._checkers = checkers
        self._side_by_side = side_by_side

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

        batch = _Batch(wanted, into, held, Gathered(results, len(pieces), finish))
        if _in_memory(pieces):  # copied and verified by each thread for itself, which spares handing over
            share = -(-len(pieces) // self._side_by_side)
            for first_piece in range(0, len(pieces), share):
                part = pieces[first_piece : first_piece + share]
                self._readers.submit(self._read, part, batch, self._check)
        elif pieces:  # one stream from the disk: two would have the system read ahead for neither
            self._stream.submit(self._read, pieces, batch, self._hand_over)
        return batch.gathered.future

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
        pieces: Sequence[Piece],
        batch: _Batch,
        check: Callable[[Piece, _Batch, Sequence[memoryview]], object],
    ) -> None:
        """Read pieces in the order in which they lie in the file, and have each verified."""
        left = list(pieces)
        try:
            # Headers first: small reads in between would interrupt the stream of payloads.
            headers = [file.read_headers(first, len(positions)) for file, first, positions in pieces]
            for (file, first, positions), raw in zip(pieces, headers, strict=True):
                with file.reading() as fd:
                    full = file.read_payloads(fd, first, [batch.into[position] for position in positions])
                check(left.pop(0), batch, raw[:full])
        except Exception as error:
            for piece in left:
                self._fail(piece, batch, error)

    def _hand_over(self, piece: Piece, batch: _Batch, headers: Sequence[memoryview]) -> None:
        self._checkers.submit(self._check, piece, batch, headers)

    def _check(self, piece: Piece, batch: _Batch, headers: Sequence[memoryview]) -> None:
        """Verify what was read of a piece, quarantine what is wrong, and let go of its slots."""
        _, _, positions = piece
        try:
            outcomes: list[RecordHeader | MissReason] = [
                self._verify(batch.held[position], raw, batch.wanted[position], batch.into[position])
                for position, raw in zip(positions, headers, strict=False)
            ]
            outcomes += ["length"] * (len(positions) - len(outcomes))
            self._store.reads.succeeded()
            self._conclude(positions, [batch.held[position] for position in positions], outcomes, batch)
        except Exception as error:
            self._fail(piece, batch, error)
            return
        batch.gathered.piece_done()

    def _fail(self, piece: Piece, batch: _Batch, error: Exception) -> None:
        """The device's failure, or a defect of ours: misses either way, and told."""
        _, _, positions = piece
        self._store.reads.failed(error)
        for position in positions:
            batch.gathered.results[position] = Loaded("io_error")
        self._store.release(batch.held[position] for position in positions)
        batch.gathered.piece_done()

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
        batch: _Batch,
    ) -> None:
        store, results = self._store, batch.gathered.results
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
                results[position] = Loaded(None, deadline, outcome.meta(deadline=deadline))
        with store.lock:
            store.index.touch(used, now)
        store.release(entries)


def _in_memory(pieces: Sequence[Piece]) -> bool:
    """Whether the system has these pieces in its cache, by a look at each one's first and last slot."""
    return bool(pieces) and all(file.is_cached(first, len(positions)) for file, first, positions in pieces)
