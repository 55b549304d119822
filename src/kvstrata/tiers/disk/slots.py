"""The three files of one (fingerprint, group): which slots have room on the disk, and moving runs of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstrata.tiers.disk.files import Buffer, Files, read_fully, write_fully
from kvstrata.tiers.disk.geometry import PARTS, USE_BYTES, Geometry, Part, runs

GROWTH_BYTES = 16 << 20  # files grow by so much at a time, so that they lie in few pieces
MOST_PUNCHED = 4096  # slots in one call


class SlotFile:
    """Slots in files. The bookkeeping is under the store's lock; reading and writing is not.

    slots: that the files have. free: slots with room on the disk and no record, lowest first. holes: slots
    whose room was given back. A slot that is in neither is its owner's.
    """

    def __init__(self, folder: Path, geometry: Geometry, files: Files, *, write: bool) -> None:
        """Open the files, creating them if they are to be written. Raises OSError."""
        self.geometry = geometry
        self.files = files
        self.write = write
        self.dirty = False
        self._fds: dict[Part, int] = {}
        self._lent: list[int] = []  # descriptors of payloads that nobody reads through just now
        try:
            for part in PARTS:
                with suppress(*(() if write or part != "uses" else (FileNotFoundError,))):
                    path = folder / f"{geometry.stem}.{part}"
                    self._fds[part] = files.open(path, write=write, create=write)
            self.measure()
        except OSError:
            self.close()
            raise
        self._free: list[int] = []
        self._holes: list[int] = []
        self._zeros = bytes(geometry.header_bytes)
        self._pad = bytes(geometry.stride - geometry.payload_bytes)

    def measure(self) -> None:
        """Take the number of slots from the files. Raises OSError."""
        self.slots = self.files.state(self._fds["payloads"]).size // self.geometry.stride

    def close(self) -> None:
        """Close the files; harmless the second time."""
        while self._fds or self._lent:
            fd = self._lent.pop() if self._lent else self._fds.popitem()[1]
            with suppress(OSError):
                self.files.close(fd)

    @property
    def charged(self) -> int:
        """Bytes that these files take, at most."""
        return self.geometry.charge(self.slots, len(self._holes))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_gone(self) -> bool:
        """Whether someone removed a file: what is written from then on is lost with the descriptor."""
        return any(self.files.state(self._fds[part]).links == 0 for part in ("headers", "payloads"))

    def settle(self, used: set[int]) -> None:
        """After a scan: give back the room of all slots but the `used` ones. Raises OSError."""
        last = max(used, default=-1) + 1
        sizes: dict[Part, int] = {
            "payloads": self.geometry.stride,
            "headers": self.geometry.header_bytes,
            "uses": USE_BYTES,
        }
        for part, nbytes in sizes.items():
            if part != "uses" or self.files.state(self._fds[part]).size > last * nbytes:
                self.files.truncate(self._fds[part], last * nbytes)
        self.slots = last
        self._free.clear()
        self._holes.clear()
        self.erase([slot for slot in range(last) if slot not in used])

    def unowned(self) -> list[int]:
        """Slots that are free or holes, for checks."""
        return [*self._free, *self._holes]

    def take(self, n: int) -> list[int]:
        """Up to `n` free slots, the lowest, so that what is stored together lies together."""
        return [heapq.heappop(self._free) for _ in range(min(n, len(self._free)))]

    def put_back(self, slots: Iterable[int]) -> None:
        """These slots hold no record any more, and keep their room."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def grow(self, n: int, room: int) -> bool:
        """Take room on the disk for `n` slots or more, within `room` bytes; false where not one fits.

        Raises OSError where the disk has no room.
        """
        geometry, stride = self.geometry, self.geometry.stride
        refilled = min(len(self._holes), n, room // stride)
        if refilled:
            taken = [heapq.heappop(self._holes) for _ in range(refilled)]
            try:
                for first, count in runs(taken, MOST_PUNCHED):
                    self.files.allocate(self._fds["payloads"], first * stride, count * stride)
            except OSError:
                for slot in taken:
                    heapq.heappush(self._holes, slot)
                raise
            self.put_back(taken)
            return True
        added = min(max(n, GROWTH_BYTES // stride), room // stride)
        holes = len(self._holes)
        while added and geometry.charge(self.slots + added, holes) > self.charged + room:
            added -= 1
        if not added:
            return False
        try:
            self.files.allocate(self._fds["payloads"], self.slots * stride, added * stride)
            size = geometry.header_bytes
            self.files.allocate(self._fds["headers"], self.slots * size, added * size)
        except OSError:
            self.files.truncate(self._fds["payloads"], self.slots * stride)
            raise
        self.put_back(range(self.slots, self.slots + added))
        self.slots += added
        return True

    def give_back_free(self) -> bool:
        """Give the room of all free slots back to the disk; false where that changes nothing."""
        freed = sorted(self._free)
        self._free.clear()
        return self._punch(freed)

    def erase(self, slots: Sequence[int]) -> bool:
        """Make slots empty on the disk too, and give their room back; false where it cannot be given back.

        Raises OSError.
        """
        ascending = sorted(slots)
        try:
            self.blank(ascending)
        except OSError:
            self.put_back(ascending)
            raise
        return self._punch(ascending)

    def blank(self, ascending: Sequence[int]) -> None:
        """Overwrite headers, so that a scan does not find these records again. Raises OSError."""
        for first, count in runs(list(ascending), MOST_PUNCHED):
            place = first * self.geometry.header_bytes
            write_fully(self.files, self._fds["headers"], [self._zeros] * count, place)
            self.dirty = True

    def write_run(self, first: int, headers: Sequence[Buffer], payloads: Sequence[memoryview]) -> None:
        """Write neighbouring records, payloads before headers. Raises OSError, also for a short write."""
        padded: list[Buffer] = list(payloads)
        if self._pad:
            padded = [buffer for payload in payloads for buffer in (payload, self._pad)]
        write_fully(self.files, self._fds["payloads"], padded, first * self.geometry.stride)
        write_fully(self.files, self._fds["headers"], headers, first * self.geometry.header_bytes)
        self.dirty = True  # only now: a sync that began before does not cover this

    def read_headers(self, first: int, count: int) -> list[memoryview]:
        """Headers of neighbouring slots, as many as the file has. Raises OSError."""
        size = self.geometry.header_bytes
        raw = bytearray(count * size)
        got = read_fully(self.files, self._fds["headers"], [raw], first * size) // size
        return [memoryview(raw)[i * size : (i + 1) * size] for i in range(got)]

    @contextmanager
    def reading(self) -> Iterator[int]:
        """A descriptor of the payloads for one reader, whose reading in order has the system read ahead."""
        fd = self._lent.pop() if self._lent else self.files.reopen(self._fds["payloads"])
        try:
            yield fd
        finally:
            self._lent.append(fd)

    def read_payloads(
        self, fd: int, first: int, into: Sequence[memoryview], *, check_pad: bool = False
    ) -> int:
        """Fill memory from neighbouring slots; returns for how many the file had all bytes. Raises OSError.

        fd: of `reading`. check_pad: stop before a slot whose bytes after the payload are not zero.
        """
        buffers: list[memoryview | bytearray] = list(into)
        pads = [bytearray(len(self._pad)) for _ in into] if self._pad else []
        if pads:
            buffers = [buffer for pair in zip(into, pads, strict=True) for buffer in pair]
        got = read_fully(self.files, fd, buffers, first * self.geometry.stride)
        full = (got + len(self._pad)) // self.geometry.stride
        if check_pad:
            full = next((i for i, pad in enumerate(pads[:full]) if any(pad)), full)
        return full

    def is_cached(self, first: int, count: int) -> bool:
        """Whether the payloads of a run seem to be in the system's cache."""
        stride, fd = self.geometry.stride, self._fds["payloads"]
        return all(self.files.is_cached(fd, place * stride) for place in (first, first + count - 1))

    def read_uses(self) -> bytes:
        """The file of uses, whatever is in it. Raises OSError."""
        if "uses" not in self._fds:
            return b""
        raw = bytearray(self.files.state(self._fds["uses"]).size)
        return bytes(raw[: read_fully(self.files, self._fds["uses"], [raw], 0)])

    def write_uses(self, rows: bytes) -> None:
        """Replace the file of uses. Raises OSError."""
        write_fully(self.files, self._fds["uses"], [rows], 0)
        self.files.truncate(self._fds["uses"], len(rows))

    def modified_ns(self) -> int:
        """When headers were last written."""
        return self.files.state(self._fds["headers"]).modified_ns

    def sync(self) -> None:
        """Make what was written durable. Raises OSError."""
        if self.dirty:
            self.dirty = False
            try:
                for part in ("payloads", "headers"):
                    self.files.sync(self._fds[part])
            except OSError:
                self.dirty = True
                raise

    def _punch(self, ascending: list[int]) -> bool:
        """Free slots become holes, or stay free where the file system has none or fails."""
        stride, given_back = self.geometry.stride, 0
        try:
            for first, count in runs(ascending, MOST_PUNCHED):
                if not self.files.punch(self._fds["payloads"], first * stride, count * stride):
                    break
                given_back += count
        finally:
            for slot in ascending[:given_back]:
                heapq.heappush(self._holes, slot)
            self.put_back(ascending[given_back:])
        return given_back > 0
