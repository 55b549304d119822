"""One request's way from the engine's thread to its reader in an event loop.

Neither side ever waits for the other. What is not read yet is merged to one piece an answer, so that a reader
who is slow, or gone, costs no more memory than the answer itself.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from kvstrata.engine.outputs import Delta, Logprob, RequestOutput


@dataclass
class _Piece:
    """What is new of one answer; the lists grow while nobody takes them."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @classmethod
    def of(cls, delta: Delta) -> _Piece:
        piece = cls()
        piece.add(delta)
        return piece

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Outbox:
    """Collects a request's deltas for one reader, who awaits `take` in the event loop that made it.

    whole: the reader wants the result only; the deltas before the last are dropped.
    """

    def __init__(self, request_id: str, *, whole: bool = False) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._whole = whole
        self._lock = threading.Lock()  # held for moments only, on either side
        self._pieces: dict[int, Delta | _Piece] = {}  # a lone delta stays as it is
        self._result: RequestOutput | None = None
        self._error: Exception | None = None
        self._notified = False
        self._ready = False  # the two below belong to the event loop
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> bool:
        """Add a delta, on the engine's thread; returns whether the reader has to be woken for it."""
        with self._lock:
            self._result = delta.result
            if self._whole:
                return delta.result is not None
            self._add(delta)
            return self._notify()

    def _add(self, delta: Delta) -> None:
        before = self._pieces.get(delta.index)
        if before is None:
            self._pieces[delta.index] = delta
            return
        if isinstance(before, Delta):
            before = self._pieces[delta.index] = _Piece.of(before)
        before.add(delta)

    def fail(self, error: Exception) -> bool:
        """End the request with an error, from any thread; returns whether the reader has to be woken."""
        with self._lock:
            self._error = error
            return self._notify()

    def _notify(self) -> bool:
        wake, self._notified = not self._notified, True
        return wake

    def wake(self) -> None:
        """Let the reader go on; to be called in the event loop."""
        self._ready = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[Delta]:
        """What is new since the last call, merged to one delta an answer; the last one carries the result.

        Raises the error that the request ended with.
        """
        if not self._ready:
            self._reader = self.loop.create_future()
            await self._reader
        self._ready = False
        with self._lock:
            self._notified = False
            pieces, self._pieces = self._pieces, {}
            result, error = self._result, self._error
        if error is not None:
            raise error
        if self._whole:
            return [Delta(self.request_id, index=0, text="", token_ids=[], result=result)]
        if len(pieces) == 1:
            [only] = pieces.values()
            if isinstance(only, Delta):  # what a reader who keeps up gets each time
                return [only]
        last = next(reversed(pieces), 0)
        merged = {
            index: _Piece.of(piece) if isinstance(piece, Delta) else piece for index, piece in pieces.items()
        }
        return [
            Delta(
                request_id=self.request_id,
                index=index,
                text="".join(piece.texts),
                token_ids=piece.token_ids,
                logprobs=piece.logprobs,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                prompt_logprobs=piece.prompt_logprobs,
                result=result if index == last else None,
            )
            for index, piece in merged.items()
        ]
