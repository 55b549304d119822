"""What always holds of an open disk tier; tests ask after every step."""

from __future__ import annotations

from collections import Counter

from kvstrata.errors import IntegrityError
from kvstrata.tiers.disk.store import DiskStore


def check_integrity(store: DiskStore) -> None:
    """Raise IntegrityError unless every slot has one owner and the cap is kept; while nothing is moved."""
    with store.lock:
        entries = store.index.entries()
        for group, file in store.space.own.items():
            owners = Counter(file.unowned())
            owners.update(entry.slot for entry in entries if entry.file is file)
            wrong = [slot for slot in range(file.slots) if owners[slot] != 1]
            if wrong or sum(owners.values()) != file.slots:
                raise IntegrityError(f"slots {wrong[:8]} of group {group} have {owners} owners")
        for entry in entries:
            if entry.gone or entry.readers or store.space.own.get(entry.meta.group) is not entry.file:
                raise IntegrityError(
                    f"entry of slot {entry.slot} is in the index, but gone, read or of no file"
                )
        if store.space.capacity is not None and store.space.used > store.space.capacity:
            raise IntegrityError(f"{store.space.used} bytes are used of {store.space.capacity}")
        if store.writing:
            raise IntegrityError(
                f"{len(store.writing)} blocks are being written, but no request is under way"
            )
