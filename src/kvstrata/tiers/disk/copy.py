"""Copying all records of one folder into another: a backup, a move, a warm cache for another machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvstrata.errors import ConfigError
from kvstrata.tiers.disk.care import Progress, StoredRecord, StoreFolder
from kvstrata.tiers.disk.geometry import Geometry
from kvstrata.tiers.disk.options import DiskOptions
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.lifetime import Clocks
from kvstrata.tiers.tier import Record, StoreContext

BATCH_BYTES = 32 << 20


@dataclass
class Copied:
    """copied: records that are in the target now; passed_over: those that are not, by reason."""

    copied: int = 0
    bytes: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)


def copy_store(
    source: DiskOptions,
    target: DiskOptions,
    *,
    clocks: Clocks | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy every record that verifies; what is there already stays. Raises ConfigError, OSError."""
    if source.path.resolve() == target.path.resolve():
        raise ConfigError(f"source and target are both {str(source.path)!r}; give two folders")
    clocks = clocks or Clocks()
    result = Copied()
    with StoreFolder(source, clocks=clocks) as folder:
        for context, geometries in _contexts(folder.geometries):
            tier = DiskTier(target, context, clocks=clocks)
            try:
                for geometry in geometries:
                    good = _good(folder.payloads(geometry, progress), result)
                    _copy_file(good, geometry, tier, result, clocks)
                tier.drain()
            finally:
                tier.close()
    return result


def _contexts(geometries: Iterable[Geometry]) -> Iterator[tuple[StoreContext, list[Geometry]]]:
    """Models, and the files of their groups; a group that has none gets the size of another."""
    models: dict[tuple[bytes, int], dict[int, Geometry]] = {}
    for geometry in geometries:
        models.setdefault((geometry.fingerprint, geometry.block_size), {})[geometry.group] = geometry
    for (fingerprint, block_size), groups in models.items():
        any_size = next(iter(groups.values())).payload_bytes
        sizes = (groups[g].payload_bytes if g in groups else any_size for g in range(max(groups) + 1))
        yield StoreContext(fingerprint, block_size, tuple(sizes)), list(groups.values())


def _copy_file(
    good: Iterator[tuple[StoredRecord, memoryview]],
    geometry: Geometry,
    tier: DiskTier,
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
    found: Iterable[tuple[StoredRecord, memoryview]], result: Copied
) -> Iterator[tuple[StoredRecord, memoryview]]:
    for record, payload in found:
        reason = record.fault or ("expired" if record.remaining <= 0 else None)
        if reason is None:
            yield record, payload
        else:
            result.passed_over[reason] += 1
