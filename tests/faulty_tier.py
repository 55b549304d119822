"""A tier in memory that fails, hangs, forgets and lies on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvstrata.tiers.ram import RamTier
from kvstrata.tiers.tier import Address, Identity, Loaded, Record, StoreContext, Stored, TierUsage
from kvstrata.tiers.worker import completed


class FaultyTier:
    """A RAM tier whose faults are switched on by its attributes.

    failing: loads and stores report I/O errors. raising: every call raises. gate: loads and stores wait for
    it. vanished: addresses that are there when looked up and gone when loaded. flipped: addresses that load
    with another byte, as memory that fails would.
    """

    name = "faulty"

    def __init__(self, context: StoreContext, clock: Callable[[], float], size: int = 4 << 20) -> None:
        self._ram = RamTier(context, size, clock=clock)
        self.failing = False
        self.raising = False
        self.gate = threading.Event()
        self.gate.set()
        self.vanished: set[Address] = set()
        self.flipped: set[Address] = set()
        self.loaded: list[Address] = []
        self.stored: list[Address] = []

    def lookup(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> list[bool]:
        self._meet()
        return self._ram.lookup(addresses)

    def load(self, wanted: Sequence[Identity], into: Sequence[memoryview]) -> Future[list[Loaded]]:
        self._meet()
        if self.failing:
            return completed([Loaded("io_error")] * len(wanted))
        done: Future[list[Loaded]] = Future()
        threading.Thread(target=self._load, args=(wanted, into, done), daemon=True).start()
        return done

    def store(self, records: Sequence[Record]) -> Future[list[Stored]]:
        self._meet()
        if self.failing:
            return completed([Stored("io_error")] * len(records))
        done: Future[list[Stored]] = Future()
        threading.Thread(target=self._store, args=(records, done), daemon=True).start()
        return done

    def touch(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> None:
        self._ram.touch(addresses)

    def pin(self, addresses: Sequence[Address], deadline: float) -> list[bool]:
        return self._ram.pin(addresses, deadline)

    def unpin(self, addresses: Sequence[Address]) -> None:
        self._ram.unpin(addresses)

    def delete(self, addresses: Sequence[Address], segments: Sequence[bytes] = ()) -> int:
        return self._ram.delete(addresses)

    def clear(self) -> None:
        self._ram.clear()

    def probe(self) -> list[tuple[int, float]]:
        self._meet()
        return self._ram.probe()

    def usage(self) -> TierUsage:
        return self._ram.usage()

    def drain(self) -> None:
        self._ram.drain()

    def close(self) -> None:
        self._ram.close()

    def _meet(self) -> None:
        if self.raising:
            raise OSError("the device is gone")

    def _load(
        self, wanted: Sequence[Identity], into: Sequence[memoryview], done: Future[list[Loaded]]
    ) -> None:
        self.gate.wait()
        outcomes = self._ram.load(wanted, into).result()
        for number, identity in enumerate(wanted):
            if identity.address in self.vanished:
                outcomes[number] = Loaded("absent")
                into[number][:] = bytes(len(into[number]))
            elif identity.address in self.flipped:
                into[number][0] ^= 1
        self.loaded += [
            i.address for i, outcome in zip(wanted, outcomes, strict=True) if outcome.miss is None
        ]
        done.set_result(outcomes)

    def _store(self, records: Sequence[Record], done: Future[list[Stored]]) -> None:
        self.gate.wait()
        self.stored += [record.identity.address for record in records]
        done.set_result(self._ram.store(records).result())
