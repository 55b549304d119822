"""Batches cut into pieces that threads work on side by side: one moves bytes, another computes checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from kvstrata.tiers.disk.geometry import runs
from kvstrata.tiers.disk.slots import SlotFile

T = TypeVar("T")

PIECE_BYTES = 4 << 20  # a piece fits the caches, so that its checksum costs little after it was moved
MOST_SLOTS = 500  # in a piece: a call takes two buffers for each

Place = tuple[SlotFile, int]
Piece = tuple[SlotFile, int, list[int]]  # file, first slot, positions in the batch


def cut(places: dict[int, Place], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Pieces of neighbouring slots, as they lie in the files. places: by position in a batch."""
    by_file: dict[int, tuple[SlotFile, dict[int, int]]] = {}
    for position, (file, slot) in places.items():
        by_file.setdefault(id(file), (file, {}))[1][slot] = position
    pieces: list[Piece] = []
    for file, positions in by_file.values():
        most = min(MOST_SLOTS, max(1, piece_bytes // file.geometry.stride))
        for first, count in runs(sorted(positions), most):
            pieces.append((file, first, [positions[slot] for slot in range(first, first + count)]))
    return pieces


class Gathered(Generic[T]):
    """A future that is done when the last piece of its batch is.

    results: by position, filled by the pieces. on_done: called before the future is done.
    """

    def __init__(self, results: list[T], pieces: int, on_done: Callable[[list[T]], None]) -> None:
        self.future: Future[list[T]] = Future()
        self.results = results
        self._left = pieces
        self._lock = threading.Lock()
        self._on_done = on_done
        if not pieces:
            self._finish()

    def piece_done(self) -> None:
        """A piece has filled in its results."""
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._finish()

    def _finish(self) -> None:
        self._on_done(self.results)
        self.future.set_result(self.results)


def start(
    threads: ThreadPoolExecutor, gathered: Gathered[T], pieces: Sequence[Piece], work: Callable[[Piece], None]
) -> None:
    """Have threads work on pieces. `work` does not raise."""

    def run(piece: Piece) -> None:
        try:
            work(piece)
        finally:
            gathered.piece_done()

    for piece in pieces:
        threads.submit(run, piece)


def done(results: list[T]) -> Future[list[T]]:
    """A future of what is known at once."""
    future: Future[list[T]] = Future()
    future.set_result(results)
    return future
