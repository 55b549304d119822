"""Bytes to and from a server, plain or by TLS; a call waits a tick at most, so that deadlines are kept."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

TICK = 0.005  # seconds
_MOST_PIECES = 512  # of one gathering write; systems take 1024


class Stream(Protocol):
    """A connected socket. Raises OSError where the connection is lost."""

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Send from the first pieces; how many bytes went, 0 after a tick in which none could."""

    def receive(self, memory: memoryview, whole: bool) -> int | None:
        """Fill memory from its start, all of it if that can be; how many bytes came, 0 at the end of the
        stream, None after a tick in which none did.
        """

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Whether something came, or the other side hung up, or does within so many seconds."""

    def close(self) -> None:
        """Let go."""


class PlainStream:
    """TCP. The socket blocks and the kernel's own time-outs wake it, so that a large value is received in one
    system call, which lets other threads run meanwhile.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        tick = struct.pack("@ll", 0, int(TICK * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def send(self, pieces: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(pieces[:_MOST_PIECES])
        except BlockingIOError:
            return 0

    def receive(self, memory: memoryview, whole: bool) -> int | None:
        try:
            return self._socket.recv_into(memory, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError:
            return None

    def is_readable(self, seconds: float = 0.0) -> bool:
        return _is_readable(self._socket, seconds)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


class TlsStream:
    """TLS, which has no gathering write and whose waiting is Python's."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        connected.settimeout(TICK)

    def send(self, pieces: Sequence[memoryview]) -> int:
        try:
            return self._socket.send(pieces[0])
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def receive(self, memory: memoryview, whole: bool) -> int | None:
        try:
            return self._socket.recv_into(memory)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def is_readable(self, seconds: float = 0.0) -> bool:
        return _is_readable(self._socket, seconds)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _is_readable(connected: socket.socket, seconds: float) -> bool:
    if isinstance(connected, ssl.SSLSocket) and connected.pending():
        return True
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1e3))


def connect(host: str, port: int, tls: ssl.SSLContext | None, timeout: float) -> Stream:
    """Connect within so many seconds. Raises OSError, of which TimeoutError is one."""
    connected = socket.create_connection((host, port), timeout)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None:
            return PlainStream(connected)
        return TlsStream(tls.wrap_socket(connected, server_hostname=host))
    except BaseException:
        connected.close()
        raise
