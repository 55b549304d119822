"""Blocks for tests of tiers: chains of them, with payloads that tell which block they are of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvstrata.cache.keys import Extras, KeyChain
from kvstrata.cache.policy import Meta
from kvstrata.tiers.disk import DiskOptions
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import Address, Identity, Loaded, Record, StoreContext, Tier

FINGERPRINT = bytes(range(32))
PAYLOAD = 5000  # no multiple of 4 KiB
CONTEXT = StoreContext(FINGERPRINT, 16, (PAYLOAD,))


@dataclass
class Time:
    """Clocks that stand still until a test moves them."""

    monotonic: float = 1000.0
    wall: float = 1_700_000_000.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.monotonic, lambda: self.wall)

    def pass_by(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


def payload_of(seed: int, group: int = 0, size: int = PAYLOAD) -> memoryview:
    """The bytes of a block, the same each time."""
    return memoryview(np.random.default_rng([seed, group]).bytes(size))


def blocks(
    count: int,
    *,
    chain: int = 0,
    salt: str = "",
    deadline: float = math.inf,
    context: StoreContext = CONTEXT,
    group: int = 0,
) -> list[Record]:
    """A sequence's first `count` blocks; `chain` tells sequences apart."""
    keys = KeyChain(context.fingerprint, context.block_size, Extras(salt))
    keys.extend([chain * 4096 + i for i in range(count * context.block_size)])
    return [
        Record(
            Identity(
                Address(keys.keys[i], group),
                keys.parent(i),
                keys.block_tokens(i),
                keys.encoded_extras(i),
                keys.segment(i),
            ),
            Meta(
                parent=keys.parent(i),
                group=group,
                depth=i,
                bytes=context.payload_bytes[group],
                deadline=deadline,
            ),
            payload_of(chain * 1000 + i, group, context.payload_bytes[group]),
        )
        for i in range(count)
    ]


def with_deadline(records: Sequence[Record], deadline: float) -> list[Record]:
    return [replace(record, meta=replace(record.meta, deadline=deadline)) for record in records]


def load(tier: Tier, records: Sequence[Record]) -> tuple[list[Loaded], list[memoryview]]:
    """Load what these records hold into new memory."""
    into = [memoryview(bytearray(len(record.payload))) for record in records]
    return tier.load([record.identity for record in records], into).result(timeout=60), into


def misses(tier: Tier, records: Sequence[Record]) -> list[str | None]:
    """Why each is not there (None: it is); what is served must be right."""
    outcomes, into = load(tier, records)
    for outcome, payload, record in zip(outcomes, into, records, strict=True):
        assert outcome.miss is not None or payload == record.payload
    return [outcome.miss for outcome in outcomes]


def drops(tier: Tier, records: Sequence[Record]) -> list[str | None]:
    """Store, and why each was not kept."""
    return [stored.dropped for stored in tier.store(records).result(timeout=60)]


def folder_bytes(path: Path) -> int:
    """What a folder takes from the disk, itself included."""
    return sum(entry.stat().st_blocks * 512 for entry in (path, *path.iterdir()))


def options(path: Path, size: int = 1 << 24, **others: object) -> DiskOptions:
    return DiskOptions(path / "store", size, **others)  # type: ignore[arg-type]


HIT = None
