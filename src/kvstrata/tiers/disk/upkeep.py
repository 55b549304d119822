"""What a disk tier does by itself now and then: sync, drop what expired, note uses, look for new records."""

from __future__ import annotations

import threading
import time

from kvstrata.tiers.disk.opening import refresh
from kvstrata.tiers.disk.store import DiskStore

TICK = 0.5  # seconds: what `sync=batch` may lose to a loss of power
USES_EVERY = 120  # ticks
REFRESH_EVERY = 4  # ticks, for a reader beside a writer
REFRESH_SHARE = 0.05  # of the time may go into it


class Upkeep:
    """A thread that ends with the tier."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._stop = threading.Event()
        self._refresh_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstrata-disk-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        tick = 0
        while not self._stop.wait(TICK):
            tick += 1
            try:
                self._keep_up(tick)
            except Exception as error:  # upkeep is tried again; serving goes on
                self._store.reads.mention(error)

    def _keep_up(self, tick: int) -> None:
        store = self._store
        if store.options.read_only:
            if tick % REFRESH_EVERY == 0 and time.monotonic() >= self._refresh_at:
                begun = time.monotonic()
                refresh(store)
                self._refresh_at = time.monotonic() + (time.monotonic() - begun) / REFRESH_SHARE
            return
        if store.options.sync == "batch":
            store.sync()
        with store.lock:
            store.space.release_expired(store.clocks.monotonic())
        if tick % USES_EVERY == 0:
            store.write_uses()
