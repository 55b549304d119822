"""One line a request, as JSON or logfmt, written by a thread of its own.

A log that cannot be written, because a pipe is full or a disk is, loses lines and counts them; it never holds
up a request.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import IO, Any

Fields = Mapping[str, Any]
_MAX_WAITING = 10_000  # lines


def as_json(fields: Fields) -> str:
    """One JSON object, without what is None."""
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def as_logfmt(fields: Fields) -> str:
    """`name=value` pairs, without what is None; texts are quoted where they have to be."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": entry for key, entry in value.items()})
        else:
            flat[name] = value
    return " ".join(f"{name}={_logfmt(value)}" for name, value in flat.items() if value is not None)


def _logfmt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    plain = text != "" and all("!" <= char <= "~" and char not in '"=\\' for char in text)
    return text if plain else json.dumps(text)


FORMATS: Mapping[str, Callable[[Fields], str]] = {"json": as_json, "logfmt": as_logfmt}


class RequestLog:
    """Writes lines to a stream in a thread. form: `json` or `logfmt`."""

    def __init__(self, stream: IO[str], form: str) -> None:
        self._stream = stream
        self._form = FORMATS[form]
        self._lines: queue.Queue[Fields | None] = queue.Queue(_MAX_WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="kvstrata-log", daemon=True)
        self._thread.start()

    def write(self, event: str, **fields: Any) -> None:
        """Log one event; returns at once."""
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        try:
            self._lines.put_nowait({"time": now, "event": event, **fields})
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = 2.0) -> None:
        """Write what is left, for at most `timeout` seconds."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (fields := self._lines.get()) is not None:
            try:
                self._stream.write(self._form(fields) + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the reader is gone, or the stream was closed
                self.dropped += 1
