"""One server as the tier sees it: a few connections, a breaker, and figures of what it does."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstrata.tiers.breaker import Breaker, State
from kvstrata.tiers.valkey.connection import Connection
from kvstrata.tiers.valkey.errors import ServerAvoidedError, ServerDownError, ServerError
from kvstrata.tiers.valkey.resp import Command, Reply
from kvstrata.tiers.valkey.settings import Server, ValkeySettings

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0  # seconds that a server is left alone: soon found again, cheap to ask
_TIMEOUTS = 2  # in a row, until it is left alone: one may be our own machine's, when it is busy
_log = logging.getLogger("kvstrata.tiers")


@dataclass
class NodeFigures:
    """What a server did. seconds, calls: of small calls; bytes: of values. errors: by kind of ServerError."""

    calls: int = 0
    call_seconds: float = 0.0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    repairs: int = 0
    copies: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class _Pool:
    """Open connections that nobody uses, and places for some more."""

    def __init__(self, size: int) -> None:
        self._places = threading.Semaphore(size)
        self._idle: list[Connection] = []  # a list's own methods are atomic
        self.epoch = 0  # connections of earlier ones are not used again

    def acquire(self, deadline: float) -> bool:
        return self._places.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def take(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            if connection.is_clean:
                return connection
            connection.close()  # the server hung up meanwhile, as one that was started anew did
        return None

    def give(self, connection: Connection | None) -> None:
        if connection is not None:
            self._idle.append(connection)
        self._places.release()

    def clear(self) -> None:
        self.epoch += 1
        while (connection := self.take()) is not None:
            connection.close()


class Node:
    """Calls of one server, from any thread. Errors open its breaker; it is asked again once `probe` has found
    that it answers.
    """

    def __init__(self, server: Server, settings: ValkeySettings, tls: ssl.SSLContext | None) -> None:
        self.server = server
        self.name = server.name
        self.figures = NodeFigures()
        self.breaker = Breaker(
            time.monotonic, failures=_TIMEOUTS, first_pause=FIRST_PAUSE, longest_pause=LONGEST_PAUSE
        )
        self.lock = threading.Lock()  # guards the figures
        self._settings = settings
        self._tls = tls
        self._small = _Pool(settings.connections)
        self._large = _Pool(settings.connections)
        self._told = ""

    @property
    def state(self) -> State:
        return self.breaker.state

    @property
    def is_up(self) -> bool:
        """Whether it is worth asking."""
        return self.breaker.state == "closed"

    def execute(self, commands: Sequence[Command], timeout: float | None = None) -> list[Reply]:
        """Send commands in one pipelined round trip; their replies, of which some may be ReplyError values.

        timeout: seconds, waiting for a connection included (None: the settings'). Raises ServerError.
        """
        deadline = time.monotonic() + (self._settings.timeout if timeout is None else timeout)
        if not self.is_up:
            raise ServerAvoidedError("it failed of late", self.name)
        return self._ask(commands, deadline)

    def probe(self, timeout: float) -> None:
        """Ask whether it is there, although it failed of late. Raises ServerError."""
        self._large.clear()
        self._small.clear()
        self._ask([("PING",)], time.monotonic() + timeout)

    def _ask(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        begin = time.monotonic()
        with self._connection(self._small, deadline) as connection:
            replies = connection.call(commands, deadline)
        with self.lock:
            self.figures.calls += 1
            self.figures.call_seconds += time.monotonic() - begin
        return replies

    @contextmanager
    def transfer(self, deadline: float) -> Iterator[Connection]:
        """A connection for values, out of the way of small calls. Raises ServerError."""
        if not self.is_up:
            raise ServerAvoidedError("it failed of late", self.name)
        with self._connection(self._large, deadline) as connection:
            yield connection

    @contextmanager
    def _connection(self, pool: _Pool, deadline: float) -> Iterator[Connection]:
        if not pool.acquire(deadline):
            raise ServerAvoidedError("all connections to it are in use", self.name)
        connection, epoch = pool.take(), pool.epoch
        done = False
        try:
            if connection is None:
                connection = Connection(self.server, self._settings.credentials, self._tls, deadline)
            yield connection
            done = True
        except ServerError as error:
            self._failed(error)
            raise
        else:
            self._works()
        finally:
            if connection is not None and not (done and epoch == pool.epoch):
                connection.close()
                connection = None
            pool.give(connection)

    def _failed(self, error: ServerError) -> None:
        with self.lock:
            self.figures.errors[kind_of(error)] += 1
        if isinstance(error, ServerDownError):
            self.breaker.timed_out()  # there is no doubt about it
        else:
            self.breaker.failed()
        if self._told != error.reason:
            self._told = error.reason
            _log.warning(
                "valkey server %s fails: %s; answers do not depend on it, hits do", self.name, error.reason
            )

    def _works(self) -> None:
        if self.breaker.succeeded() or self._told:
            self._told = ""
            _log.warning("valkey server %s works again", self.name)

    def close(self) -> None:
        """Hang up."""
        self._small.clear()
        self._large.clear()


def kind_of(error: ServerError) -> str:
    """An error's name in metrics: `down`, `timeout`, `broken`, `refuses`, `avoided`."""
    return type(error).__name__.removeprefix("Server").removesuffix("Error").lower()
