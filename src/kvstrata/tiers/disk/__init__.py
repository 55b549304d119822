"""Blocks in files: the disk tier, and looking after its folder."""

from kvstrata.tiers.disk.options import DiskOptions
from kvstrata.tiers.disk.tier import DiskTier

__all__ = ["DiskOptions", "DiskTier"]
