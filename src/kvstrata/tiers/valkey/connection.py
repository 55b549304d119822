"""One connection to one server: pipelined commands out, replies in, each within a deadline."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence

from kvstrata.tiers.valkey.errors import (
    ReplyError,
    ServerDownError,
    ServerError,
    ServerRefusesError,
    ServerTimeoutError,
)
from kvstrata.tiers.valkey.resp import Command, Reply, ReplyReader, encode
from kvstrata.tiers.valkey.settings import Credentials, Server
from kvstrata.tiers.valkey.stream import connect

_REFUSALS = frozenset(("WRONGPASS", "NOAUTH", "NOPERM", "DENIED"))


class Connection:
    """A stream, its reader and the deadline of what it does now. Used by one thread at a time.

    Any ServerError leaves it out of step with the server: close it. reader: for values that are received
    where they belong.
    """

    def __init__(
        self, server: Server, credentials: Credentials, tls: ssl.SSLContext | None, deadline: float
    ) -> None:
        """Connect and log in by `deadline` (monotonic seconds). Raises ServerError."""
        self._name = server.name
        self._deadline = self._limit = deadline
        self._stall = 0.0
        try:
            self._stream = connect(server.host, server.port, tls, max(1e-3, deadline - time.monotonic()))
        except TimeoutError:
            raise ServerTimeoutError("no connection in time", self._name) from None
        except (OSError, UnicodeError) as error:  # a UnicodeError: no name of a host can be so
            raise ServerDownError(_reason(error), self._name) from None
        self.reader = ReplyReader(self._receive)
        try:
            self._log_in(credentials)
        except BaseException:
            self.close()
            raise

    @property
    def is_clean(self) -> bool:
        """Whether it can be used, of one that is idle: nothing was sent to us, not even that it is over."""
        return not self._stream.is_readable()

    def call(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Send commands in one go; their replies, of which some may be ReplyError values.

        Raises ServerError; the commands may then have been executed or not.
        """
        self.begin(deadline)
        self.send(commands)
        return [self.reply() for _ in commands]

    def begin(self, deadline: float, stall: float = 0.0) -> None:
        """What follows has to be done by `deadline`; where `stall` is given, each byte has to move within so
        many seconds of the one before too.
        """
        self._deadline, self._stall = deadline, stall
        self._limit = min(deadline, time.monotonic() + stall) if stall else deadline

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands in gathering writes; large arguments are not copied."""
        pieces = [memoryview(piece).cast("B") for piece in encode(commands)]
        first = 0
        while first < len(pieces):
            try:
                sent = self._stream.send(pieces[first:])
            except OSError as error:
                raise ServerDownError(_reason(error), self._name) from None
            self._note(sent)
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def reply(self) -> Reply:
        """The next reply."""
        try:
            return self.reader.reply()
        except ServerError as error:
            error.server = self._name
            raise

    def close(self) -> None:
        """Hang up."""
        self._stream.close()

    def _log_in(self, credentials: Credentials) -> None:
        """Say who we are, and see that someone answers."""
        words: list[Command] = [("PING",)]
        if credentials.password is not None or credentials.user is not None:
            user = () if credentials.user is None else (credentials.user,)
            words.insert(0, ("AUTH", *user, credentials.password or ""))
        for outcome in self.call(words, self._deadline):
            if isinstance(outcome, ReplyError):
                if outcome.code in _REFUSALS:
                    raise ServerRefusesError(str(outcome), self._name)
                if outcome.code == "ERR":  # not passed on: servers of other kinds might repeat what they got
                    raise ServerRefusesError("it does not take the user and password", self._name)
                raise ServerDownError(str(outcome), self._name)  # it is loading, say

    def _note(self, moved: int) -> None:
        """Bytes moved, or none did for a tick: look at the deadline."""
        now = time.monotonic()
        if moved and self._stall:
            self._limit = min(self._deadline, now + self._stall)
        if now >= self._limit:
            raise ServerTimeoutError("no answer in time", self._name)

    def _receive(self, memory: memoryview, whole: bool) -> int:
        """See `ReplyReader`."""
        count = 0
        if not whole and not self._stall:  # to the point, where a tick might end after the deadline
            try:
                self._stream.is_readable(self._limit - time.monotonic())
            except OSError as error:
                raise ServerDownError(_reason(error), self._name) from None
            self._note(0)
        while True:
            try:
                got = self._stream.receive(memory[count:], whole)
            except OSError as error:
                raise ServerDownError(_reason(error), self._name) from None
            if got == 0:
                raise ServerDownError("it hung up", self._name)
            count += got or 0
            if count and (not whole or count == len(memory)):
                return count
            self._note(got or 0)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
