"""Files that fail, stall or forget, as a test asks; below them the system's."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.tiers.disk.files import Buffer, SystemFiles


class FaultyFiles(SystemFiles):
    """Each hook is called before the call that it is named after, and may raise or wait.

    short_writes: writes take so many bytes at most.
    """

    def __init__(self) -> None:
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None
        self.before_allocate: Callable[[], None] = lambda: None
        self.short_writes: int | None = None
        self.writes = 0
        self.reads = 0

    def preadv(self, fd: int, into: Sequence[memoryview | bytearray], offset: int) -> int:
        self.reads += 1
        self.before_read()
        return super().preadv(fd, into, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.writes += 1
        self.before_write()
        if self.short_writes is not None:
            return os.pwrite(fd, b"".join(buffers)[: self.short_writes], offset)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.before_allocate()
        super().allocate(fd, offset, length)


class ForgetfulFiles(SystemFiles):
    """What was not synced is only in this process, page by page, as before a loss of power.

    `leak` writes through a share of the unsynced pages, as the system may at any time.
    """

    PAGE = 4096

    def __init__(self, leak: Callable[[], bool]) -> None:
        self._leak = leak
        self._lock = threading.Lock()
        self._pages: dict[tuple[int, int], bytes] = {}  # by inode and page

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        inode, done = os.fstat(fd).st_ino, 0
        with self._lock:
            if os.fstat(fd).st_size < offset + len(data):
                os.ftruncate(fd, offset + len(data))
            while done < len(data):
                number, at = divmod(offset + done, self.PAGE)
                part = data[done : done + self.PAGE - at]
                page = self._page(fd, inode, number)
                page = page[:at] + part + page[at + len(part) :]
                if self._leak():
                    self._pages.pop((inode, number), None)
                    self._write_page(fd, number, page)
                else:
                    self._pages[inode, number] = page
                done += len(part)
        return len(data)

    def preadv(self, fd: int, into: Sequence[memoryview | bytearray], offset: int) -> int:
        inode, done = os.fstat(fd).st_ino, 0
        with self._lock:
            for buffer in into:
                view, at = memoryview(buffer), 0
                while at < len(view):
                    number, start = divmod(offset + done, self.PAGE)
                    part = self._page(fd, inode, number)[start : start + len(view) - at]
                    view[at : at + len(part)] = part
                    at += len(part)
                    done += len(part)
        return min(done, max(0, os.fstat(fd).st_size - offset))

    def sync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        with self._lock:
            for key in [key for key in self._pages if key[0] == inode]:
                self._write_page(fd, key[1], self._pages.pop(key))
        super().sync(fd)

    def is_cached(self, fd: int, offset: int) -> bool:
        return False

    def _page(self, fd: int, inode: int, number: int) -> bytes:
        page = self._pages.get((inode, number))
        if page is None:
            page = os.pread(fd, self.PAGE, number * self.PAGE).ljust(self.PAGE, b"\0")
        return page

    def _write_page(self, fd: int, number: int, page: bytes) -> None:
        size = os.fstat(fd).st_size  # never beyond the end: that would be a write that nobody made
        os.pwrite(fd, page[: max(0, size - number * self.PAGE)], number * self.PAGE)


def no_room(*_: object) -> None:
    """A hook: the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def every(n: int, fail: Callable[[], None]) -> Callable[[], None]:
    """A hook: one call in `n` fails."""
    calls = iter(range(1, 1 << 30))

    def hook() -> None:
        if next(calls) % n == 0:
            fail()

    return hook


def files_of(path: Path, part: str) -> Path:
    """The one file of a store that holds that part."""
    (found,) = (path / "store").glob(f"*.{part}")
    return found
