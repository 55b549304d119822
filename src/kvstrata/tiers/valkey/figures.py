"""What servers hold, asked for now and then, so that nobody who wants figures waits for a server."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstrata.tiers.tier import ServerUsage
from kvstrata.tiers.valkey.errors import ServerError
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.resp import Reply
from kvstrata.tiers.valkey.servers import Servers

_EVERY = 2.0  # seconds
_PATIENCE = 0.5


@dataclass(frozen=True)
class Held:
    """What servers said last. used_bytes: all that they use. capacity_bytes: None where one has no limit.
    evicted: blocks that went for want of room, since the servers were started.
    """

    used_bytes: int = 0
    capacity_bytes: int | None = None
    keys: int = 0
    evicted: int = 0
    policy: str = ""


class Survey:
    """A thread that asks all servers that are up."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._held: dict[str, Held] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-valkey-survey", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def held(self) -> Held:
        """Of all servers that are members, as they said last."""
        names = {node.name for node in self._servers.nodes}
        known = [held for name, held in self._held.items() if name in names]
        capacities = [held.capacity_bytes for held in known]
        return Held(
            sum(held.used_bytes for held in known),
            sum(c for c in capacities if c is not None) if known and None not in capacities else None,
            sum(held.keys for held in known),
            sum(held.evicted for held in known),
            ",".join(sorted({held.policy for held in known})),
        )

    def ask(self) -> None:
        """Ask all servers that are up now."""
        for node in self._servers.nodes:
            if node.is_up and not self._stop.is_set():
                self._ask(node)

    def _ask(self, node: Node) -> None:
        try:
            memory, stats, keys = node.execute(
                [("INFO", "memory"), ("INFO", "stats"), ("DBSIZE",)], _PATIENCE
            )
        except ServerError:
            return  # noted by the node; what it said last stands
        fields = parse_info(memory) | parse_info(stats)
        limit = _number(fields.get("maxmemory"))
        self._held[node.name] = Held(
            _number(fields.get("used_memory")),
            limit or None,
            keys if isinstance(keys, int) else 0,
            _number(fields.get("evicted_keys")),
            fields.get("maxmemory_policy", ""),
        )

    def _run(self) -> None:
        self.ask()
        while not self._stop.wait(_EVERY):
            self.ask()


def server_usages(servers: Servers) -> tuple[ServerUsage, ...]:
    """Figures of each server at this moment."""
    found = []
    for node in servers.nodes:
        figures = node.figures
        with node.lock:
            found.append(
                ServerUsage(
                    name=node.name,
                    state=node.state,
                    trips=node.breaker.trips,
                    calls=figures.calls,
                    call_seconds=figures.call_seconds,
                    loaded_bytes=figures.loaded_bytes,
                    load_seconds=figures.load_seconds,
                    stored_bytes=figures.stored_bytes,
                    store_seconds=figures.store_seconds,
                    repairs=figures.repairs,
                    copies=figures.copies,
                    errors=figures.errors.copy(),
                )
            )
    return tuple(found)


def parse_info(reply: Reply) -> dict[str, str]:
    """The fields of an INFO reply; none where it is something else."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
