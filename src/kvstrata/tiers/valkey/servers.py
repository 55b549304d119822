"""All servers of a tier: which keep what, who is up, who comes and goes, and who is back again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstrata.tiers.ring import Ring
from kvstrata.tiers.valkey.errors import ServerAvoidedError, ServerError
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.resp import Command, Reply
from kvstrata.tiers.valkey.settings import Server, ValkeySettings
from kvstrata.tiers.valkey.slots import parse_slots

_TICK = 0.05  # seconds between looks at who may be back
_PROBE_SECONDS = 0.2
_SLOTS_EVERY = 1.0  # seconds
_log = logging.getLogger("kvstrata.tiers")


class Placement(Protocol):
    """Which servers keep a segment."""

    def owners(self, name: bytes, count: int) -> tuple[str, ...]:
        """Distinct servers for a segment, the one to be asked first in front."""


class Servers:
    """Nodes by name, placed by a ring, or by a cluster's slots. Any thread may use it.

    on_return: called, in the prober's thread, with each node that is up again.
    """

    def __init__(
        self, settings: ValkeySettings, on_return: Callable[[Node], None] = lambda node: None
    ) -> None:
        """Connect to nobody yet. Raises ConfigError for TLS files that cannot be used."""
        self.settings = settings
        self._tls = None if settings.tls is None else settings.tls.context()
        self._on_return = on_return
        self._lock = threading.Lock()  # guards changes; what is read is replaced whole
        self._nodes = {server.name: self._node(server) for server in settings.servers}
        self.placement: Placement = Ring(
            () if settings.cluster else (server.member for server in settings.servers)
        )
        self._before: tuple[tuple[float, Placement], ...] = ()  # until when, and where things were
        self._returned: dict[str, float] = {}
        self._slots_due = time.monotonic() + _SLOTS_EVERY
        self._stop = threading.Event()
        self._prober = threading.Thread(target=self._probe, name="kvstrata-valkey-probe", daemon=True)
        self._prober.start()

    @property
    def nodes(self) -> list[Node]:
        """All there are, those that leave too, until the grace period is over."""
        return list(self._nodes.values())

    @property
    def members(self) -> list[str]:
        """The names of those that keep blocks now."""
        placement = self.placement
        if isinstance(placement, Ring):
            return [member.name for member in placement.members]
        return [node.name for node in self.nodes]

    def node(self, name: str) -> Node:
        """A node by name. Raises ServerAvoidedError for one that has left."""
        node = self._nodes.get(name)
        if node is None:
            raise ServerAvoidedError("it is no member any more", name)
        return node

    def owner(self, segment: bytes) -> str | None:
        """The server for leases and small calls about a segment: the first in its order that is up."""
        owners = self.keepers(segment)
        return owners[0].name if owners else None

    def nominal(self, segment: bytes) -> tuple[str, ...]:
        """The names of those that should keep a segment, up or not."""
        return self.placement.owners(segment, self.settings.replicas)

    def keepers(self, segment: bytes) -> list[Node]:
        """Who keeps a segment now: as many as there should be, of those that are up."""
        return self._up(self.placement, segment, self.settings.replicas)

    def sources(self, segment: bytes) -> list[Node]:
        """Whom to ask for a segment, one after the other: those who keep it; while one of them is new or was
        away, the next in line, who stood in for it; and in a grace period those who kept it before.
        """
        now = time.monotonic()
        found = dict.fromkeys(self.keepers(segment))
        if any(self._returned.get(node.name, -1.0) > now for node in found):
            found |= dict.fromkeys(self._up(self.placement, segment, self.settings.replicas + 1))
        for until, placement in self._before:
            if until > now:
                found |= dict.fromkeys(self._up(placement, segment, self.settings.replicas))
        return list(found)

    def execute(self, name: str, commands: Sequence[Command], timeout: float | None = None) -> list[Reply]:
        """Send commands to a server in one pipelined round trip; see `Node.execute`. Raises ServerError."""
        return self.node(name).execute(commands, timeout)

    def change(self, servers: Sequence[Server]) -> bool:
        """A new membership; False where it is the one there is. For the grace period the old owners are asked
        for what the new ones do not have yet.
        """
        ring = Ring(server.member for server in servers)
        with self._lock:
            if isinstance(self.placement, Ring) and ring.members == self.placement.members:
                return False
            until = time.monotonic() + self.settings.grace
            nodes = dict(self._nodes)
            for server in servers:
                if server.name not in nodes:
                    nodes[server.name] = self._node(server)
            self._nodes = nodes
            self._before = ((until, self.placement), *self._before)
            self.placement = ring
        _log.warning("valkey servers are now %s", ", ".join(member.name for member in ring.members))
        return True

    def ask_for_slots(self) -> bool:
        """Have a cluster say where its slots are; False if nobody does."""
        for node in self.nodes:
            try:
                [reply] = node.execute([("CLUSTER", "SLOTS")], max(self.settings.timeout, _PROBE_SECONDS))
            except ServerError:
                continue
            slots = parse_slots(reply, node.server)
            if slots is None:
                continue
            with self._lock:
                nodes = dict(self._nodes)
                for each in slots.ranges:
                    if each.primary.name not in nodes:
                        nodes[each.primary.name] = self._node(each.primary)
                self._nodes = nodes
                self.placement = slots
            return True
        return False

    def close(self) -> None:
        """Hang up everywhere; harmless the second time."""
        self._stop.set()
        if self._prober is not threading.current_thread():
            self._prober.join()
        for node in self.nodes:
            node.close()

    def _up(self, placement: Placement, segment: bytes, count: int) -> list[Node]:
        nodes = self._nodes
        names = placement.owners(segment, len(nodes))
        up = (node for name in names if (node := nodes.get(name)) is not None and node.is_up)
        return [node for node, _ in zip(up, range(count), strict=False)]

    def _node(self, server: Server) -> Node:
        return Node(server, self.settings, self._tls)

    def _probe(self) -> None:
        while not self._stop.wait(_TICK):
            for node in self.nodes:
                if node.state == "half-open" and not self._stop.is_set():
                    self._try(node)
            if self.settings.cluster and time.monotonic() >= self._slots_due:
                self._slots_due = time.monotonic() + _SLOTS_EVERY
                self.ask_for_slots()
            if self._before and self._before[-1][0] <= time.monotonic():
                self._forget()

    def _try(self, node: Node) -> None:
        try:
            node.probe(max(self.settings.timeout, _PROBE_SECONDS))
        except ServerError:
            return  # the node's breaker has noted it
        self._returned[node.name] = time.monotonic() + self.settings.grace
        try:
            self._on_return(node)
        except Exception:
            _log.exception("what is done when server %s is back failed", node.name)

    def _forget(self) -> None:
        """The grace period of a change is over: those that left are not asked any more."""
        now = time.monotonic()
        with self._lock:
            self._before = tuple(each for each in self._before if each[0] > now)
            if self._before or not isinstance(self.placement, Ring):
                return
            members = {member.name for member in self.placement.members}
            gone = [node for name, node in self._nodes.items() if name not in members]
            self._nodes = {name: node for name, node in self._nodes.items() if name in members}
        for node in gone:
            node.close()
