"""Copying all records of one folder into another: a backup, a move, a warm cache for another machine."""

from __future__ import annotations

from kvstrata.errors import ConfigError
from kvstrata.tiers.care import Copied, Progress, copy_records
from kvstrata.tiers.disk.care import StoreFolder
from kvstrata.tiers.disk.options import DiskOptions
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.lifetime import Clocks


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
    with StoreFolder(source, clocks=clocks) as folder:
        return copy_records(
            folder,
            lambda context: DiskTier(target, context, clocks=clocks),
            clocks=clocks,
            progress=progress,
        )
