"""How much memory there is on this machine for a pool or an arena, cgroup limits included."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CPU = torch.device("cpu")
_LEFT_FREE = 4  # memory is short where less than this part of it is unused
_CGROUP = Path("/sys/fs/cgroup")
# For version 2 and 1: limit, usage, and what memory.stat calls cached file pages that can go at once.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: torch.device) -> int:
    """Bytes that new allocations may take on the device: the least of what machine and cgroup leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_meminfo("MemAvailable")]
    for limit, usage, inactive in _GROUP_FILES:
        left = _cgroup_left(_CGROUP / limit, _CGROUP / usage, inactive)
        if left is not None:
            limits.append(left)
    return min(limits)


def total_bytes(device: torch.device) -> int:
    """Bytes that the device could give if nothing else ran: the least of machine and cgroup."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    limits = [_meminfo("MemTotal")]
    limits += [n for limit, _, _ in _GROUP_FILES if (n := _number(_CGROUP / limit)) is not None]
    return min(limits)


def is_short() -> bool:
    """Whether so little main memory is unused that none should be taken ahead of its use."""
    # the page cache is in use here
    unused = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(unused, available_bytes(_CPU)) < total_bytes(_CPU) // _LEFT_FREE


def _meminfo(field: str) -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux: half of the physical memory is a fair guess
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 if field == "MemAvailable" else 1)
        )
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields.get(field, fields["MemTotal"]).split()[0]) * 1024


def _cgroup_left(limit: Path, usage: Path, inactive: str) -> int | None:
    """What a group's limit leaves; file pages that only wait to be dropped, as a model's do, are no use."""
    most, used = _number(limit), _number(usage)
    if most is None or used is None:
        return None
    return min(most, max(most - used + _stat(usage.parent / "memory.stat", inactive), 0))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _stat(path: Path, field: str) -> int:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) for words in lines if words[0] == field), 0)
    except (OSError, ValueError, IndexError):
        return 0
