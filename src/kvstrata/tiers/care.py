"""Looking after a store without a model, whatever kind it is: list it, verify it, clean it up, copy it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Protocol, Self

from kvstrata.cache.keys import salt_of
from kvstrata.errors import ConfigError
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.record import RecordHeader
from kvstrata.tiers.tier import MissReason, Record, StoreContext, Tier
from kvstrata.tiers.url import TierUrl

BATCH_BYTES = 32 << 20

Progress = Callable[[int, int], None]  # records looked at, and in all


@dataclass(frozen=True)
class StoredRecord:
    """Something that a store holds. geometry: sizes, and whose it is. slot: its number in a file, 0 on a
    server. header: or None, and fault tells why. age, remaining: seconds. place: server and name, on servers.
    """

    geometry: Geometry
    slot: int
    header: RecordHeader | None
    fault: MissReason | None
    age: float = 0.0
    remaining: float = 0.0
    place: str = ""

    @property
    def salt(self) -> str:
        """The cache salt that its block was stored under."""
        return "" if self.header is None else salt_of(self.header.extras)


@dataclass
class Cleaned:
    """What `clean` did. removed: records by reason; before, after: bytes of the store."""

    removed: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    before: int = 0
    after: int = 0


@dataclass
class Copied:
    """copied: records that are in the target now; passed_over: those that are not, by reason."""

    copied: int = 0
    bytes: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)


class Store(Protocol):
    """A store as one looks after it; `close` it, or use it in a `with` statement.

    Its methods raise OSError or KVStrataError where it cannot be read.
    """

    @property
    def geometries(self) -> list[Geometry]:
        """Of each model and group that it has something of."""

    @property
    def used_bytes(self) -> int:
        """What it takes where it is."""

    def records(self, progress: Progress | None = None) -> Iterator[StoredRecord]:
        """All that it holds, by headers alone."""

    def verify(self, progress: Progress | None = None) -> Iterator[StoredRecord]:
        """The same with payloads verified, and signatures where there is a key."""

    def payloads(
        self, geometry: Geometry | None, progress: Progress | None = None
    ) -> Iterator[tuple[StoredRecord, memoryview]]:
        """Verified records of one model and group (None: of all) and payloads, in memory that is theirs."""

    def clean(
        self, unwanted: Callable[[StoredRecord], str | None], progress: Progress | None = None
    ) -> Cleaned:
        """Remove what is no record, what has expired and what `unwanted` has a reason for."""

    def close(self) -> None:
        """Let go of it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_store(url: TierUrl, *, write: bool = False) -> Store:
    """The store that a URL names. Raises ConfigError for what keeps nothing that one could look at."""
    if url.scheme == "disk":
        from kvstrata.tiers.disk.care import StoreFolder  # noqa: PLC0415  (only who has one pays for its import)
        from kvstrata.tiers.disk.options import DiskOptions  # noqa: PLC0415

        return StoreFolder(DiskOptions.from_url(url, needs_size=False), write=write)
    if url.scheme in ("valkey", "valkey+cluster"):
        from kvstrata.tiers.valkey.care import StoreServers  # noqa: PLC0415
        from kvstrata.tiers.valkey.settings import ValkeySettings  # noqa: PLC0415

        return StoreServers(ValkeySettings.from_url(url))
    raise ConfigError(
        f"tier {url.text!r} keeps nothing that another process could look at; give a disk:// or valkey:// URL"
    )


def copy_records(
    source: Store,
    open_target: Callable[[StoreContext], Tier],
    *,
    by_segment: bool = False,
    clocks: Clocks | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy every record that verifies; what is there already stays. Raises ConfigError, OSError.

    by_segment: the target places records by segment, so those without one are passed over.
    """
    clocks = clocks or Clocks()
    result = Copied()
    for context, geometries in _contexts(source.geometries):
        tier = open_target(context)
        try:
            for geometry in geometries:
                good = _good(source.payloads(geometry, progress), result, by_segment)
                _copy_group(good, geometry, tier, result, clocks)
            tier.drain()
        finally:
            tier.close()
    return result


def _contexts(geometries: Iterable[Geometry]) -> Iterator[tuple[StoreContext, list[Geometry]]]:
    """Models, and what there is of their groups; a group that has nothing gets the size of another."""
    models: dict[tuple[bytes, int], dict[int, Geometry]] = {}
    for geometry in geometries:
        models.setdefault((geometry.fingerprint, geometry.block_size), {})[geometry.group] = geometry
    for (fingerprint, block_size), groups in models.items():
        any_size = next(iter(groups.values())).payload_bytes
        sizes = (groups[g].payload_bytes if g in groups else any_size for g in range(max(groups) + 1))
        yield StoreContext(fingerprint, block_size, tuple(sizes)), list(groups.values())


def _copy_group(
    good: Iterator[tuple[StoredRecord, memoryview]],
    geometry: Geometry,
    tier: Tier,
    result: Copied,
    clocks: Clocks,
) -> None:
    while batch := list(islice(good, max(1, BATCH_BYTES // geometry.stride))):
        now = clocks.monotonic()
        records = [
            Record(header.identity, header.meta(now, now + record.remaining), payload)
            for record, payload in batch
            if (header := record.header) is not None
        ]
        for stored in tier.store(records).result():
            if stored.dropped is None:
                result.copied += 1
                result.bytes += geometry.payload_bytes
            else:
                result.passed_over[stored.dropped] += 1


def _good(
    found: Iterable[tuple[StoredRecord, memoryview]], result: Copied, by_segment: bool
) -> Iterator[tuple[StoredRecord, memoryview]]:
    for record, payload in found:
        reason: str | None = record.fault or ("expired" if record.remaining <= 0 else None)
        if reason is None and by_segment and record.header is not None and not record.header.segment:
            reason = "no_segment"
        if reason is None:
            yield record, payload
        else:
            result.passed_over[reason] += 1
