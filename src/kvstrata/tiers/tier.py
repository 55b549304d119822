"""The protocol of a place below the pool, and what goes over it.

A tier keeps blocks by address and gives them back verified, or not at all. Calls are batched; what moves
bytes returns a future, so that nobody waits who need not. Payloads are memory of the caller's: a tier reads
or fills it until the future is done, and never copies it through Python objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvstrata.cache.policy import Meta

MissReason = Literal[
    "absent",  # not there, or gone since it was looked up
    "expired",
    "magic",  # not a record
    "version",  # a record of another format of records
    "fingerprint",  # of another model, KV format, block size or arithmetic
    "address",  # of another key or group
    "parent",
    "content",  # other token ids or extras under the same key
    "length",
    "header_checksum",
    "payload_checksum",
    "signature",  # not signed by the key that was given
    "io_error",
    "unavailable",  # on a part of the tier that is left alone for now
    "closed",
]
DropReason = Literal["quota", "too_big", "io_error", "unavailable", "full", "read_only", "closed"]


class Address(NamedTuple):
    """What a block is stored and looked up by: its key (32 bytes) and its layer group."""

    key: bytes
    group: int


@dataclass(frozen=True)
class StoreContext:
    """Whose blocks a tier keeps.

    fingerprint: of the model, 32 bytes; blocks of others are not found. block_size: tokens a block.
    payload_bytes: of a block, for each layer group in order. chained: for each group whether a block is worth
    nothing without those before it, which holds for full attention and not for windows (None: in all groups).
    """

    fingerprint: bytes
    block_size: int
    payload_bytes: tuple[int, ...]
    chained: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Identity:
    """What a record must be, compared field by field when it is loaded.

    parent: key of the block before it, the fingerprint for the first. token_ids: u32 little-endian. extras:
    of `Extras.encode` in `cache.keys`. segment: see `KeyChain.segment`; tells no block from another, only
    where it is placed (empty: not known).
    """

    address: Address
    parent: bytes
    token_ids: bytes
    extras: bytes
    segment: bytes = field(default=b"", compare=False)


@dataclass(frozen=True)
class Record:
    """A block on its way into a tier.

    meta: what policies weigh; its deadline is by the monotonic clock. payload: uint8 `[payload_bytes]`, left
    alone by its owner until the store is done.
    """

    identity: Identity
    meta: Meta
    payload: memoryview


@dataclass(frozen=True)
class Loaded:
    """The outcome of loading one block.

    miss: why it is not there (None: it is, verified). deadline: from when on it is not served, by the
    monotonic clock. meta: as it was stored, for a hit.
    """

    miss: MissReason | None = None
    deadline: float = float("inf")
    meta: Meta | None = None


@dataclass(frozen=True)
class Stored:
    """The outcome of storing one block: kept, or why not (None: kept, or there already)."""

    dropped: DropReason | None = None


@dataclass(frozen=True)
class ServerUsage:
    """One server of a tier that has several. state: of its breaker. calls: small ones, such as look-ups.

    repairs: values that it was given because it had missed them; copies: because it is new. errors: by kind.
    """

    name: str
    state: str
    trips: int
    calls: int
    call_seconds: float
    loaded_bytes: int
    load_seconds: float
    stored_bytes: int
    store_seconds: float
    repairs: int
    copies: int
    errors: Counter[str]


@dataclass
class TierUsage:
    """What a tier holds and has done; bytes of capacity None: unbounded.

    records: of all fingerprints. evictions: by reason (`space`, `expired`, `quota`, `quarantined`,
    `replaced`, `deleted`). misses: loads that failed, by `MissReason`. drops: stores that were not kept, by
    `DropReason`. policy: by which its blocks go when room is needed. servers: of a tier that has several.
    """

    used_bytes: int = 0
    capacity_bytes: int | None = None
    records: int = 0
    stores: int = 0
    loads: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    evictions: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    policy: str = ""
    servers: tuple[ServerUsage, ...] = ()


class Tier(Protocol):
    """A place for blocks. Every method may be called from any thread; after `close` all are misses.

    A failing device costs hits, not answers: `load` and `store` report outcomes and do not raise for it.
    A tier may have two attributes besides: `ttl`, the most seconds for which it serves a block, and, where
    processes share it, `leases`, a `LeaseStore` (None: switched off).
    """

    @property
    def name(self) -> str:
        """`ram`, `disk` or `valkey`: the source that hits are counted under."""

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> list[bool]:
        """Whether each block is likely to be there, without reading it; no use is noted.

        segments: of each address, for tiers that place blocks by them; a block that was stored with its
        segment is found by it only.
        """

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        """Read blocks of one sequence, in order, in one batched request; a miss leaves its memory undefined.

        into: writable uint8 `[payload_bytes]` of each block, left alone by its owner until the future is
        done. Counts as a use of those that hit.
        """

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        """Keep blocks, in order; those that are there already are only noted as used."""

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        """Note a use of blocks that were found in a place above; segments as for `lookup`."""

    def pin(self, addresses: Sequence[Address], deadline: float) -> list[bool]:
        """Keep blocks from eviction until a time by the monotonic clock; false for those not here."""

    def unpin(self, addresses: Sequence[Address]) -> None:
        """Undo `pin`."""

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> int:
        """Remove blocks; returns how many were there. segments as for `lookup`."""

    def clear(self) -> None:
        """Remove all blocks of the context's fingerprint."""

    def probe(self) -> list[tuple[int, float]]:
        """Bytes and seconds of some reads such as loads make, to know at opening about how quick they are.

        Changes nothing, and counts as no use. Empty where there is nothing to tell it by.
        """

    def usage(self) -> TierUsage:
        """Figures at this moment."""

    def drain(self) -> None:
        """Return when what was handed over before is where it will be (a disk tier: synced)."""

    def close(self) -> None:
        """Finish what is under way and let go of all resources; harmless the second time."""
