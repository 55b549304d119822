"""A proxy in front of a server that slows down, holds back or cuts what goes through it, on command."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType


class BadNetwork:
    """Forwards connections to a port of this machine.

    delay: seconds before each piece of an answer goes on. piece: bytes of a piece. holding: nothing goes on.
    """

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self.piece = 64 << 10
        self.holding = threading.Event()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Reset all connections."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def __enter__(self) -> BadNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                if self._closed:
                    return
                client.close()  # its server is gone
                continue
            self._ends += [client, server]
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(self.piece):
                if is_answer and self.delay:
                    time.sleep(self.delay)
                while self.holding.is_set() and not self._closed:
                    time.sleep(0.005)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
