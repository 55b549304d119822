"""A store's folder: who may use it, and which files in it are the store's."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.tiers.disk.files import FILE_MODE
from kvstrata.tiers.disk.geometry import PARTS, Geometry, parse_stem

LOCK = "LOCK"
FOLDER_MODE = 0o700
OVERHEAD_BYTES = 8192  # the folder itself and the lock


class Folder:
    """An open folder, locked unless it is only read.

    A folder that holds other things and no store is refused: its mode would be changed, and files would be
    mixed. A second writer is refused too.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """Raises ConfigError where the folder cannot be used."""
        self.path = path
        self.read_only = read_only
        self._lock: int | None = None
        try:
            if not read_only:
                _prepare(path)
                self._lock = _take_lock(path)
            elif not (path / LOCK).is_file():
                raise ConfigError(f"disk tier {str(path)!r} holds no store, and ro=1 creates none")
        except OSError as error:
            raise ConfigError(
                f"disk tier {str(path)!r} cannot be used: {error.strerror}; choose a folder that can be "
                f"{'read' if read_only else 'written, or add ro=1'}"
            ) from None

    def stems(self) -> dict[str, Geometry | None]:
        """Names of the files of stores in the folder, without their part; None for those of no known form."""
        found: dict[str, Geometry | None] = {}
        for entry in sorted(os.listdir(self.path)):
            stem, _, part = entry.rpartition(".")
            if part in PARTS and stem:
                found[stem] = parse_stem(stem)
        return found

    def paths(self, stem: str) -> Iterator[Path]:
        """Where the files of that name are or would be."""
        return (self.path / f"{stem}.{part}" for part in PARTS)

    def check_held(self) -> None:
        """Make sure that the folder is still the one that we locked; lock its successor if it was replaced.

        Raises OSError where there is none, or another process has it.
        """
        if self._lock is None or os.fstat(self._lock).st_nlink > 0:
            return
        try:
            successor = _take_lock(self.path)  # never created here: below may be an unmounted mount point
        except ConfigError as error:
            raise OSError(str(error)) from None
        os.close(self._lock)
        self._lock = successor

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _prepare(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(FOLDER_MODE)
    if not (path / LOCK).exists():
        others = sorted(os.listdir(path))
        if others:
            raise ConfigError(
                f"disk tier {str(path)!r} holds {others[0]!r} and no store; give an empty or new folder"
            )
    if path.stat().st_mode & 0o777 != FOLDER_MODE:
        path.chmod(FOLDER_MODE)


def _take_lock(path: Path) -> int:
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if owner == str(os.getpid()):
            raise ConfigError(
                f"disk tier {str(path)!r} is in use by this process already; name a folder once"
            ) from None
        raise ConfigError(
            f"disk tier {str(path)!r} is in use by process {owner}; give another folder, or ro=1 to read it"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
