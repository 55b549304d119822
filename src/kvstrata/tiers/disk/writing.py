"""Storing: slots for a batch, records into them, and only then into the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from kvstrata.cache.keys import salt_of
from kvstrata.tiers.disk.index import Entry
from kvstrata.tiers.disk.pieces import PIECE_BYTES, Gathered, Piece, cut, done, start
from kvstrata.tiers.disk.slots import SlotFile
from kvstrata.tiers.disk.store import DiskStore
from kvstrata.tiers.lifetime import Lifetime
from kvstrata.tiers.record import encode_header, fits
from kvstrata.tiers.refresh import prolongs
from kvstrata.tiers.tier import DropReason, Record, Stored

SYNCED_PIECE_BYTES = 64 << 20  # each is followed by a sync of its own
MOST_REQUESTS = 64  # under way or waiting; more are dropped


@dataclass(frozen=True)
class _Plan:
    """Where one record goes. token: what tells this write from another of the same block."""

    file: SlotFile
    slot: int
    serial: int
    deadline: float
    salt: str
    token: object


class Writer:
    """Batched stores of a store: a record is found only after all of it was written."""

    def __init__(self, store: DiskStore, threads: ThreadPoolExecutor) -> None:
        self._store = store
        self._threads = threads
        self._pending: Counter[str] = Counter()  # bytes being written, by salt

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        """See `Tier.store`; everything happens in threads, looking for room too."""
        store = self._store
        refusal: DropReason | None = None
        if store.options.read_only:
            refusal = "read_only"
        elif store.closed:
            refusal = "closed"
        elif not store.enter("store", MOST_REQUESTS):
            refusal = "full"
        elif not store.writes.allows():
            store.leave("store")
            refusal = "io_error"
        if refusal is not None:
            with store.lock:
                store.totals.drops[refusal] += len(records)
            return done([Stored(refusal)] * len(records))
        future: Future[list[Stored]] = Future()
        self._threads.submit(self._begin, list(records), future)
        return future

    def _begin(self, records: Sequence[Record], future: Future[list[Stored]]) -> None:
        store = self._store
        begun = store.clocks.monotonic()
        results = [Stored()] * len(records)
        plans: dict[int, _Plan] = {}
        try:
            plans = self._plan(records, results, begun)
        except Exception as error:  # a defect of ours; nothing was written
            store.writes.failed(error)
            results[:] = [Stored("io_error")] * len(records)
        piece_bytes = PIECE_BYTES if store.options.sync != "always" else SYNCED_PIECE_BYTES
        places = {position: (plan.file, plan.slot) for position, plan in plans.items()}
        pieces = cut(places, piece_bytes)

        def finish(stored: list[Stored]) -> None:
            kept = [position for position in plans if stored[position].dropped is None]
            drops = Counter(one.dropped for one in stored if one.dropped is not None)
            with store.lock:
                store.totals.stores += len(kept)
                store.totals.stored_bytes += sum(len(records[position].payload) for position in kept)
                store.totals.store_seconds += store.clocks.monotonic() - begun
                store.totals.drops.update(drops)
            store.leave("store")
            future.set_result(stored)

        gathered = Gathered(results, len(pieces), finish)
        start(self._threads, gathered, pieces, lambda piece: self._write(piece, plans, records, results))

    def _plan(self, records: Sequence[Record], results: list[Stored], now: float) -> dict[int, _Plan]:
        """Slots for the records that are to be written; outcomes for the others. Raises OSError."""
        store = self._store
        wanted: dict[int, list[int]] = {}
        with store.lock:
            for position, record in enumerate(records):
                reason, needed = self._judge(record, now)
                if reason is not None:
                    results[position] = Stored(reason)
                elif needed:
                    store.writing[record.identity.address] = record
                    wanted.setdefault(record.identity.address.group, []).append(position)
            plans: dict[int, _Plan] = {}
            for group, positions in wanted.items():
                try:
                    plans |= self._allot(group, positions, records, results, now)
                except OSError as error:
                    store.writes.failed(error)
                    for position in positions:
                        results[position] = Stored("io_error")
                for position in set(positions) - plans.keys():
                    del store.writing[records[position].identity.address]
            return plans

    def _allot(
        self,
        group: int,
        positions: list[int],
        records: Sequence[Record],
        results: list[Stored],
        now: float,
    ) -> dict[int, _Plan]:
        """Slots of one group's file, the first records first. Under the lock. Raises OSError."""
        store = self._store
        file = store.file_for_writing(group)
        allowed = self._within_quota(file, positions, records, results, now)
        slots = store.space.acquire(file, len(allowed), now)
        plans: dict[int, _Plan] = {}
        for position, slot in zip(allowed, slots, strict=False):
            record = records[position]
            deadline = self._deadline(record, now)
            salt = salt_of(record.identity.extras)
            plans[position] = _Plan(file, slot, store.next_serial, deadline, salt, record)
            store.next_serial += 1
            self._pending[salt] += file.geometry.slot_bytes
        for position in allowed[len(slots) :]:
            results[position] = Stored("full")
        return plans

    def _judge(self, record: Record, now: float) -> tuple[DropReason | None, bool]:
        """Why a record cannot be kept, if so; and whether it is to be written."""
        store = self._store
        address = record.identity.address
        if address.group >= len(store.context.payload_bytes):
            return "too_big", False
        geometry = store.geometry(address.group)
        fitting = len(record.payload) == geometry.payload_bytes and fits(
            record.identity, geometry.header_bytes
        )
        if not fitting or (store.options.quota or geometry.slot_bytes) < geometry.slot_bytes:
            return ("quota" if fitting else "too_big"), False
        if address in store.writing or record.meta.deadline <= now:
            return None, False
        entry = store.present(address, now)
        if entry is None:
            return None, True
        store.index.touch([entry], now)
        return None, prolongs(entry.meta.deadline, self._deadline(record, now), now)

    def _deadline(self, record: Record, now: float) -> float:
        return min(record.meta.deadline, now + self._store.options.ttl * (1 - record.meta.spread))

    def _within_quota(
        self,
        file: SlotFile,
        positions: list[int],
        records: Sequence[Record],
        results: list[Stored],
        now: float,
    ) -> list[int]:
        """The positions whose salt has room, after evicting others of that salt."""
        store, quota, each = self._store, self._store.options.quota, file.geometry.slot_bytes
        if quota is None:
            return positions
        by_salt: dict[str, list[int]] = {}
        for position in positions:
            by_salt.setdefault(salt_of(records[position].identity.extras), []).append(position)
        allowed: list[int] = []
        for salt, mine in by_salt.items():
            kept = mine[: quota // each]
            others = self._pending[salt] - quota
            while (over := store.index.owner_bytes(salt) + len(kept) * each + others) > 0:
                victims = store.index.victims(-(-over // each), now, salt)
                store.space.evict(victims, "quota", file)
                if not victims:
                    kept = kept[: max(0, len(kept) - -(-over // each))]
                    break
            for position in mine[len(kept) :]:
                results[position] = Stored("quota")
            allowed += kept
        return sorted(allowed)

    def _write(
        self, piece: Piece, plans: dict[int, _Plan], records: Sequence[Record], results: list[Stored]
    ) -> None:
        """Write one piece and make it findable, or roll it back."""
        file, first, positions = piece
        store = self._store
        try:
            headers = [self._header(records[position], plans[position]) for position in positions]
            file.write_run(first, headers, [records[position].payload for position in positions])
            if store.options.sync == "always":
                file.sync()
        except Exception as error:  # the device's, or a defect of ours: not kept either way, and told
            store.writes.failed(error)
            self._roll_back(file, [plans[position] for position in positions], records, positions)
            for position in positions:
                results[position] = Stored("io_error")
            return
        store.writes.succeeded()
        self._publish(positions, plans, records)

    def _header(self, record: Record, plan: _Plan) -> bytearray:
        store = self._store
        return encode_header(
            store.context.fingerprint,
            record.identity,
            record.meta,
            record.payload,
            serial=plan.serial,
            lifetime=Lifetime.until(plan.deadline, store.clocks),
            size=plan.file.geometry.header_bytes,
            signing_key=store.options.signing_key,
        )

    def _publish(self, positions: list[int], plans: dict[int, _Plan], records: Sequence[Record]) -> None:
        store = self._store
        with store.lock:
            now = store.clocks.monotonic()
            for position in positions:
                plan, record = plans[position], records[position]
                address = record.identity.address
                self._pending[plan.salt] -= plan.file.geometry.slot_bytes
                here = store.space.own.get(address.group) is plan.file
                mine = store.writing.get(address) is plan.token
                if mine:
                    del store.writing[address]
                meta = replace(record.meta, born=now, deadline=plan.deadline, bytes=len(record.payload))
                name, meta = store.index.policy_meta(address.key, meta)
                entry = Entry(name, plan.file, plan.slot, plan.serial, meta, plan.salt, now)
                if not (here and mine):  # deleted meanwhile, or the file was
                    entry.gone = True
                    store.space.free(entry, erase=True)
                    continue
                older = store.index.get(address)
                if older is not None:
                    store.drop([older], "replaced")
                store.index.add(entry)
                if older is not None and older.pinned_until > now:
                    store.index.pin(entry, older.pinned_until)

    def _roll_back(
        self, file: SlotFile, plans: list[_Plan], records: Sequence[Record], positions: list[int]
    ) -> None:
        """Slots that may hold a part of a record become free, and empty if the disk still lets us."""
        store = self._store
        with store.lock:
            for position, plan in zip(positions, plans, strict=True):
                self._pending[plan.salt] -= file.geometry.slot_bytes
                address = records[position].identity.address
                if store.writing.get(address) is plan.token:
                    del store.writing[address]
            if store.space.own.get(file.geometry.group) is file:
                slots = sorted(plan.slot for plan in plans)
                with suppress(OSError):
                    file.blank(slots)
                file.put_back(slots)
