"""What can be wrong with a server, told apart by what to do about it."""

from __future__ import annotations


class ServerError(Exception):
    """A server could not do what it was asked. server: its name; reason: one line, without secrets."""

    def __init__(self, reason: str, server: str = "") -> None:
        super().__init__(f"server {server}: {reason}" if server else reason)
        self.server = server
        self.reason = reason


class ServerDownError(ServerError):
    """It cannot be reached, or hung up."""


class ServerTimeoutError(ServerError):
    """It did not answer in time."""


class ServerBrokenError(ServerError):
    """What it answers is not the protocol."""


class ServerRefusesError(ServerError):
    """It does not let us in: password, user, or its state."""


class ServerAvoidedError(ServerError):
    """It was not asked: it failed of late, or all connections to it are in use."""


class ReplyError(Exception):
    """An error reply to one command; the connection is as good as before. code: its first word."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]
