"""All servers of a tier: which keep what, who is up, and a thread that finds those again that were down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstrata.tiers.ring import Ring
from kvstrata.tiers.valkey.errors import ServerAvoidedError, ServerError
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.resp import Command, Reply
from kvstrata.tiers.valkey.settings import Server, ValkeySettings

_TICK = 0.05  # seconds between looks at who may be back
_log = logging.getLogger("kvstrata.tiers")


class Placement(Protocol):
    """Which servers keep a segment."""

    def owners(self, name: bytes, count: int) -> tuple[str, ...]:
        """Distinct servers for a segment, the one to be asked first in front."""


class Servers:
    """Nodes by name, placed by a ring. Any thread may use it.

    on_return: called, in the prober's thread, with each node that is up again.
    """

    def __init__(
        self, settings: ValkeySettings, on_return: Callable[[Node], None] = lambda node: None
    ) -> None:
        """Connect to nobody yet. Raises ConfigError for TLS files that cannot be used."""
        self.settings = settings
        self._tls = None if settings.tls is None else settings.tls.context()
        self._on_return = on_return
        self._nodes = {server.name: self._node(server) for server in settings.servers}
        self.placement: Placement = Ring(server.member for server in settings.servers)
        self._stop = threading.Event()
        self._prober = threading.Thread(target=self._probe, name="kvstrata-valkey-probe", daemon=True)
        self._prober.start()

    @property
    def nodes(self) -> list[Node]:
        """All there are."""
        return list(self._nodes.values())

    def node(self, name: str) -> Node:
        """A node by name. Raises ServerAvoidedError for one that has left."""
        node = self._nodes.get(name)
        if node is None:
            raise ServerAvoidedError("it is no member any more", name)
        return node

    def owner(self, segment: bytes) -> str | None:
        """The server for leases and small calls about a segment: the first in its order that is up."""
        for name in self.placement.owners(segment, len(self._nodes)):
            if (node := self._nodes.get(name)) is not None and node.is_up:
                return name
        return None

    def execute(self, name: str, commands: Sequence[Command], timeout: float | None = None) -> list[Reply]:
        """Send commands to a server in one pipelined round trip; see `Node.execute`. Raises ServerError."""
        return self.node(name).execute(commands, timeout)

    def close(self) -> None:
        """Hang up everywhere; harmless the second time."""
        self._stop.set()
        if self._prober is not threading.current_thread():
            self._prober.join()
        for node in self.nodes:
            node.close()

    def _node(self, server: Server) -> Node:
        return Node(server, self.settings, self._tls)

    def _probe(self) -> None:
        while not self._stop.wait(_TICK):
            for node in self.nodes:
                if node.state == "half-open" and not self._stop.is_set():
                    self._try(node)

    def _try(self, node: Node) -> None:
        try:
            node.probe(max(self.settings.timeout, 0.1))
            self._on_return(node)
        except ServerError:
            pass  # the node's breaker has noted it
        except Exception:
            _log.exception("what is done when server %s is back failed", node.name)
