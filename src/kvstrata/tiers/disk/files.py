"""The system calls of the disk tier, as a seam: tests put a layer there that fails, stalls or forgets."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

Buffer = memoryview | bytearray | bytes
FILE_MODE = 0o600  # records hold token ids
MOST_BUFFERS = 1000  # in one call; the system takes 1024

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


@dataclass(frozen=True)
class FileState:
    """What a file is. size: its length; allocated: bytes it takes from the disk; links: names it has."""

    size: int
    allocated: int
    links: int
    inode: int
    modified_ns: int


class Files(Protocol):
    """File operations by descriptor; all raise OSError, and reads and writes may be short."""

    def open(self, path: Path, *, write: bool, create: bool) -> int: ...

    def close(self, fd: int) -> None: ...

    def reopen(self, fd: int) -> int:
        """The same file once more, for reading: the system reads ahead for each descriptor on its own."""

    def preadv(self, fd: int, into: Sequence[memoryview | bytearray], offset: int) -> int: ...

    def is_cached(self, fd: int, offset: int) -> bool:
        """Whether reading a byte there would not wait for the disk; false where that cannot be told."""

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int: ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Take room on the disk, so that writing there cannot fail for want of it."""

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give room back to the disk; reads there give zeros. False where the file system cannot."""

    def truncate(self, fd: int, length: int) -> None: ...

    def sync(self, fd: int) -> None: ...

    def state(self, fd: int) -> FileState: ...

    def unlink(self, path: Path) -> None: ...

    def sync_folder(self, path: Path) -> None:
        """Make the names of files created in a folder durable."""


class SystemFiles:
    """The operating system's."""

    def open(self, path: Path, *, write: bool, create: bool) -> int:
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_NOFOLLOW
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def reopen(self, fd: int) -> int:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def preadv(self, fd: int, into: Sequence[memoryview | bytearray], offset: int) -> int:
        return os.preadv(fd, into, offset)

    def is_cached(self, fd: int, offset: int) -> bool:
        try:
            return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        fallocate = _fallocate()
        if fallocate is None:
            return False
        if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def state(self, fd: int) -> FileState:
        found = os.fstat(fd)
        return FileState(
            found.st_size, found.st_blocks * 512, found.st_nlink, found.st_ino, found.st_mtime_ns
        )

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@cache
def _fallocate() -> Any:
    """The C library's fallocate, which Python does not have, or None where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return call


def read_fully(files: Files, fd: int, into: Sequence[memoryview | bytearray], offset: int) -> int:
    """Fill buffers from a place in a file; returns how many bytes there were."""
    done = 0
    for start in range(0, len(into), MOST_BUFFERS):
        part = into[start : start + MOST_BUFFERS]
        wanted = sum(len(buffer) for buffer in part)
        got = files.preadv(fd, part, offset + done)
        done += got
        if got < wanted:
            break
    return done


def write_fully(files: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write buffers one after the other; raises OSError (EIO) where the system took only a part of them."""
    done = 0
    for start in range(0, len(buffers), MOST_BUFFERS):
        part = buffers[start : start + MOST_BUFFERS]
        wanted = sum(len(buffer) for buffer in part)
        wrote = files.pwritev(fd, part, offset + done)
        if wrote != wanted:
            raise OSError(errno.EIO, "only a part was written")
        done += wrote
