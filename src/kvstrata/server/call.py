"""One HTTP request that is being answered: what it has open at the engine, and whether its client is there.

Its life: `watch` for the client leaving, `submit`, then `all_results` or `next` until all is there, and then
`close`, whatever happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Receive

from kvstrata.engine.outbox import Outbox
from kvstrata.engine.outputs import Delta, RequestOutput
from kvstrata.engine.serving import Serving, Submission
from kvstrata.server.problems import CLIENT_CLOSED, ApiError

Batch = list[tuple[int, Delta]]  # number of the prompt, and what is new of one of its answers


class Call:
    """Requests of the engine that answer one HTTP request, one for each prompt."""

    def __init__(self, serving: Serving) -> None:
        self.left = False
        self.results: dict[int, RequestOutput] = {}
        self._serving = serving
        self._outboxes: list[Outbox] = []
        self._takes: dict[asyncio.Task[list[Delta]], int] = {}
        self._watcher: asyncio.Task[None] | None = None

    def watch(self, receive: Receive) -> None:
        """Abort what is open as soon as the client leaves; its body has been read before."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self.abort()

    def abort(self) -> None:
        """End what is open at the engine before its next step."""
        for outbox in self._outboxes:
            self._serving.abort(outbox.request_id)

    def submit(self, submissions: Sequence[Submission], *, whole: bool) -> None:
        """Hand the requests to the engine. Raises OverloadedError, StoppedError; ApiError after a leave."""
        if self.left:
            raise ApiError(CLIENT_CLOSED, "the client has left")
        for submission in submissions:
            outbox = Outbox(submission.request_id, whole=whole)
            self._serving.submit(submission, outbox)
            self._outboxes.append(outbox)

    async def all_results(self) -> list[RequestOutput]:
        """Every request's result, in order, of a whole call. Raises what a request ended with."""
        while len(self.results) < len(self._outboxes):
            await self.next()
        return [self.results[number] for number in range(len(self._outboxes))]

    async def next(self) -> Batch:
        """What is new, once something is; nothing when all has come. Raises what a request ended with."""
        if len(self.results) == len(self._outboxes):
            return []
        if len(self._outboxes) == 1:
            return self._noted(0, await self._outboxes[0].take())
        for number, outbox in enumerate(self._outboxes):
            if number not in self.results and number not in self._takes.values():
                self._takes[asyncio.create_task(outbox.take())] = number
        done, _ = await asyncio.wait(self._takes, return_when=asyncio.FIRST_COMPLETED)
        batch: Batch = []
        for task in done:
            batch += self._noted(self._takes.pop(task), task.result())
        return batch

    def _noted(self, number: int, deltas: list[Delta]) -> Batch:
        for delta in deltas:
            if delta.result is not None:
                self.results[number] = delta.result
        return [(number, delta) for delta in deltas]

    def failure(self) -> ApiError | None:
        """Why a finished request is no answer: the client has left, or it was ended by us."""
        if self.left:
            return ApiError(CLIENT_CLOSED, "the client has left")
        for result in self.results.values():
            if result.error is not None:
                return ApiError(500, result.error, code="not_finite")
            if any(answer.finish_reason == "abort" for answer in result.outputs):
                return ApiError(
                    503, "the server ended the request as it is shutting down", code="aborted", retry_after=5
                )
        return None

    def close(self) -> None:
        """Let go of everything; what is still open at the engine is aborted."""
        for task in (*self._takes, *([self._watcher] if self._watcher is not None else [])):
            task.cancel()
        if len(self.results) < len(self._outboxes):
            self.abort()
