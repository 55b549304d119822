"""How much memory the KV pool may take on this machine, cgroup limits included."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
# Of what is free once the weights are in: the rest is for activations, the page cache and other programs.
_SHARE = 0.4


def available_bytes(device: torch.device) -> int:
    """Bytes that new allocations may take on the device: the least of what machine and cgroup leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_meminfo_available()]
    for limit, usage in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current"),
        (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
    ):
        left = _cgroup_left(limit, usage)
        if left is not None:
            limits.append(left)
    return min(limits)


def auto_pool_bytes(available: int, most_useful: int) -> int:
    """Pool size where the user gave none: a share of what is free, and never more than requests can use."""
    return min(int(available * _SHARE), most_useful)


def _meminfo_available() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux: half of the physical memory is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields.get("MemAvailable", fields["MemTotal"]).split()[0]) * 1024


def _cgroup_left(limit: Path, usage: Path) -> int | None:
    try:
        text, used = limit.read_text().strip(), int(usage.read_text())
    except (OSError, ValueError):
        return None
    return None if text == "max" else max(int(text) - used, 0)
