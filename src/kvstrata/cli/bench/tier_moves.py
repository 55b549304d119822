"""How quick tiers store and load, beside memcpy and plain files of the same bytes in the same run."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np

from kvstrata.cache.keys import SEGMENT_BLOCKS, SEGMENT_BYTES
from kvstrata.cache.memory import block_memory
from kvstrata.cache.policy import Meta
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.tier import Address, Identity, Record, StoreContext, Tier

_BATCH = 64  # blocks a call, as a long prompt's
_PIECE = 4 << 20  # bytes that plain files are written and read in


class Blocks:
    """Random blocks of one layer group, and memory to load them to. nbytes: of all of them."""

    def __init__(self, context: StoreContext, total: int) -> None:
        import torch  # noqa: PLC0415  (torch is slow to import)

        self.context = context
        self.payload = context.payload_bytes[0]
        self.count = max(_BATCH, total // self.payload)
        self.nbytes = self.count * self.payload
        cpu = torch.device("cpu")
        self.source = block_memory(self.nbytes, cpu).numpy()
        self.target = block_memory(self.nbytes, cpu).numpy()
        self.source[:] = np.random.default_rng(0).integers(0, 256, self.nbytes, dtype=np.uint8)
        self.target[:] = 0
        self._name = os.urandom(8).hex()  # what is on servers may be of another run
        self._rounds = itertools.count()

    def identities(self) -> list[Identity]:
        """Names that no round before had: stores of a new round are all new."""
        rnd = next(self._rounds)
        tokens = bytes(4 * self.context.block_size)
        keys = [sha256(f"{self._name}:{rnd}:{number}".encode()).digest() for number in range(self.count)]
        parents = [self.context.fingerprint, *keys]
        return [
            Identity(Address(key, 0), parent, tokens, b"", keys[n - n % SEGMENT_BLOCKS][:SEGMENT_BYTES])
            for n, (key, parent) in enumerate(zip(keys, parents, strict=False))
        ]

    def part(self, memory: np.ndarray, number: int) -> memoryview:
        """The bytes of one block."""
        return memory[number * self.payload : (number + 1) * self.payload].data


def seconds_of(run: Callable[[], None]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def memcpy_seconds(blocks: Blocks) -> float:
    """Of copying all bytes once."""
    return seconds_of(lambda: np.copyto(blocks.target, blocks.source))


def store_seconds(tier: Tier, blocks: Blocks, identities: list[Identity]) -> float:
    """Of storing all blocks until they are where they will be."""
    records = [
        Record(identity, Meta(parent=identity.parent, depth=n), blocks.part(blocks.source, n))
        for n, identity in enumerate(identities)
    ]

    def run() -> None:
        for future in [tier.store(records[batch]) for batch in _batches(blocks.count)]:
            future.result()
        tier.drain()

    return seconds_of(run)


def load_seconds(tier: Tier, blocks: Blocks, identities: list[Identity]) -> tuple[float, bool]:
    """Of loading all blocks, and whether all came and are the bytes that were stored."""
    blocks.target[:] = 0
    memory = [blocks.part(blocks.target, n) for n in range(blocks.count)]
    came = True

    def run() -> None:
        nonlocal came
        futures = [tier.load(identities[batch], memory[batch]) for batch in _batches(blocks.count)]
        came = all(outcome.miss is None for future in futures for outcome in future.result())

    seconds = seconds_of(run)
    return seconds, came and bool(np.array_equal(blocks.source, blocks.target))


def plain_write_seconds(path: Path, blocks: Blocks) -> float:
    """Of writing all bytes to a new file, one piece after the other, and syncing it."""

    def run() -> None:
        with path.open("wb", buffering=0) as file:
            for begin in range(0, blocks.nbytes, _PIECE):
                file.write(blocks.source[begin : begin + _PIECE].data)
            os.fsync(file.fileno())

    return seconds_of(run)


def plain_read_seconds(path: Path, blocks: Blocks) -> float:
    """Of reading the file's bytes, one piece after the other."""

    def run() -> None:
        with path.open("rb", buffering=0) as file:
            for begin in range(0, blocks.nbytes, _PIECE):
                file.readinto(blocks.target[begin : begin + _PIECE].data)

    return seconds_of(run)


def drop_page_cache(folder: Path) -> None:
    """Have the system forget what it keeps of a folder's files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ram_ratios(blocks: Blocks, repeats: int) -> dict[str, float | bool]:
    """Store and load rates of the RAM tier as shares of memcpy's; the best of so many runs each, in turns."""
    room = 2 * blocks.count * -(-blocks.payload // 4096) * 4096
    one = StoreContext(blocks.context.fingerprint, blocks.context.block_size, (blocks.payload,))
    tier = open_tier(f"ram://?size={room}&policy=lru", one)
    try:
        for _ in range(2):  # the arena's memory is touched once before it counts
            store_seconds(tier, blocks, blocks.identities())
        return _beside("ram", tier, "memcpy", memcpy_seconds, blocks, repeats)
    finally:
        tier.close()


def disk_ratios(blocks: Blocks, folder: Path, repeats: int) -> dict[str, float | bool]:
    """The same of the disk tier against plain files in the same folder; reads are from the disk."""
    one = StoreContext(blocks.context.fingerprint, blocks.context.block_size, (blocks.payload,))
    plain, store = folder / "plain", folder / "store"
    best = {"write": float("inf"), "read": float("inf"), "store": float("inf"), "load": float("inf")}
    identical = True
    for _ in range(repeats):
        with _fresh(folder, store, one, 2 * blocks.nbytes) as tier:
            identities = blocks.identities()
            best["write"] = min(best["write"], plain_write_seconds(plain, blocks))
            best["store"] = min(best["store"], store_seconds(tier, blocks, identities))
            drop_page_cache(folder)
            best["read"] = min(best["read"], plain_read_seconds(plain, blocks))
            seconds, same = load_seconds(tier, blocks, identities)
            best["load"] = min(best["load"], seconds)
            identical = identical and same
        plain.unlink()
    return {
        "disk_store_vs_plain": best["write"] / best["store"],
        "disk_load_vs_plain": best["read"] / best["load"],
        "disk_store_gb_s": blocks.nbytes / best["store"] / 1e9,
        "disk_load_gb_s": blocks.nbytes / best["load"] / 1e9,
        "plain_write_gb_s": blocks.nbytes / best["write"] / 1e9,
        "plain_read_gb_s": blocks.nbytes / best["read"] / 1e9,
        "identical": identical,
    }


def loopback_seconds(blocks: Blocks) -> float:
    """Of sending all bytes through a socket of this machine, from one process' memory to another's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = subprocess.Popen(
            [sys.executable, "-c", _SENDER, str(port), str(blocks.nbytes)], stdin=subprocess.PIPE
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)  # it is ready
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def run() -> None:
                connection.sendall(b"!")
                for number in range(blocks.count):
                    memory, got = blocks.part(blocks.target, number), 0
                    while got < len(memory):
                        got += connection.recv_into(memory[got:], 0, socket.MSG_WAITALL)

            seconds = seconds_of(run)
        sender.wait()
    return seconds


_SENDER = """
import socket, sys
port, size = map(int, sys.argv[1:])
data = memoryview(bytearray(size))
data[::4096] = bytes(len(data[::4096]))
connection = socket.create_connection(("127.0.0.1", port))
connection.sendall(b"!")
connection.recv(1)
connection.sendall(data)
"""


def valkey_ratios(url: str, blocks: Blocks, repeats: int) -> dict[str, float | bool]:
    """Load and store rates of a Valkey tier as shares of raw loopback TCP's, the best of some runs each."""
    one = StoreContext(blocks.context.fingerprint, blocks.context.block_size, (blocks.payload,))
    tier = open_tier(url, one)

    def tidy(identities: list[Identity]) -> None:
        segments = [identity.segment for identity in identities]
        tier.delete([identity.address for identity in identities], segments)

    try:
        return _beside("valkey", tier, "loopback", loopback_seconds, blocks, repeats, tidy)
    finally:
        tier.close()


def _beside(  # noqa: PLR0917 (a call of two places)
    name: str,
    tier: Tier,
    plain: str,
    plain_seconds: Callable[[Blocks], float],
    blocks: Blocks,
    repeats: int,
    tidy: Callable[[list[Identity]], None] = lambda identities: None,
) -> dict[str, float | bool]:
    """Stores and loads of a tier and what is as plain as can be, in turns; the best of so many runs each.

    tidy: called with what a run stored, after it.
    """
    best = {"plain": float("inf"), "store": float("inf"), "load": float("inf")}
    identical = True
    for _ in range(repeats):
        identities = blocks.identities()
        best["plain"] = min(best["plain"], plain_seconds(blocks))
        best["store"] = min(best["store"], store_seconds(tier, blocks, identities))
        seconds, same = load_seconds(tier, blocks, identities)
        best["load"] = min(best["load"], seconds)
        identical = identical and same
        tidy(identities)
    return {
        f"{name}_store_vs_{plain}": best["plain"] / best["store"],
        f"{name}_load_vs_{plain}": best["plain"] / best["load"],
        f"{name}_store_gb_s": blocks.nbytes / best["store"] / 1e9,
        f"{name}_load_gb_s": blocks.nbytes / best["load"] / 1e9,
        f"{plain}_gb_s": blocks.nbytes / best["plain"] / 1e9,
        "identical": identical,
    }


@contextlib.contextmanager
def _fresh(folder: Path, store: Path, context: StoreContext, room: int) -> Iterator[Tier]:
    """An empty disk tier, gone with its files at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    tier = open_tier(f"disk://{store.resolve()}?size={room}", context)
    try:
        yield tier
    finally:
        tier.close()
        shutil.rmtree(store, ignore_errors=True)


def _batches(count: int) -> list[slice]:
    return [slice(begin, begin + _BATCH) for begin in range(0, count, _BATCH)]
