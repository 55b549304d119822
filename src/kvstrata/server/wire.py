"""How bytes become HTTP requests: the event loop and the parser in C where they are installed.

With uvloop and httptools a token of a stream costs less than half of the CPU time that it costs without; the
server works the same without them.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes of a request's line and headers; h11's limit, which httptools does not have


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop where it is installed, else Python's own."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    return loop


def http_protocol() -> type[HttpToolsProtocol] | str:
    """What uvicorn's `http` setting takes: httptools with a bound on heads if it is installed, else h11."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: PLC0415  (optional)

    class BoundedHttpTools(HttpToolsProtocol):
        """Refuses requests whose head is longer than `MAX_HEAD`."""

        _in_head = False
        _head = 0  # bytes received of a head that goes on

        def data_received(self, data: bytes) -> None:
            goes_on = self._in_head
            super().data_received(data)
            if goes_on and self._in_head:
                self._head += len(data)
                if self._head > MAX_HEAD and not self.transport.is_closing():
                    self.send_400_response("The request's head is too long.")

        def on_message_begin(self) -> None:
            self._in_head, self._head = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

    return BoundedHttpTools
