"""One streamed request as a client times it, over a bare connection: a load generator has to be light."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.cli.remote import Remote

_LIMIT = 1 << 22  # bytes of a line
_DATA = b"data: "


@dataclass
class Outcome:
    """What became of a request; times in seconds from when it was sent.

    gaps: between parts of the answer that came apart; a part is a token, or several where the client or the
    network is slow. error: None, or the HTTP status, or what else went wrong, in a word. late: how much later
    than planned it was sent.
    """

    late: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


async def ask(server: Remote, path: str, body: Mapping[str, Any], timeout: float) -> Outcome:
    """Send a request, streamed, and read its answer to the end. timeout: seconds for all of it."""
    outcome = Outcome()
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await _ask(server, path, body, outcome, began)
    except TimeoutError:
        outcome.error = "timeout"
    except (OSError, EOFError, ValueError) as error:
        outcome.error = "refused" if isinstance(error, ConnectionRefusedError) else "disconnected"
    outcome.total = time.perf_counter() - began
    return outcome


async def _ask(server: Remote, path: str, body: Mapping[str, Any], outcome: Outcome, began: float) -> None:
    context = ssl.create_default_context() if server.tls else None
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context, limit=_LIMIT)
    try:
        writer.write(
            _request(server, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        )
        status, chunked = await _head(reader)
        if status != 200:
            outcome.error = str(status)
            return
        last = began
        finished = False
        async for event in _events(reader, chunked):
            now = time.perf_counter()
            if event == b"[DONE]":
                finished = True
                break
            told = json.loads(event)
            if "error" in told:
                outcome.error = "in_stream"
                return
            if usage := told.get("usage"):
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.completion_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                outcome.cached_tokens = details.get("cached_tokens") or 0
            elif _has_text(told):
                if outcome.ttft is None:
                    outcome.ttft = now - began
                else:
                    outcome.gaps.append(now - last)
                last = now
        if not finished:
            outcome.error = "disconnected"
    finally:
        writer.close()


def _has_text(told: Mapping[str, Any]) -> bool:
    """Whether an event brings a token: the one that only names the role does not."""
    return any(
        choice.get("text") or choice.get("finish_reason") or (choice.get("delta") or {}).get("content")
        for choice in told.get("choices", ())
    )


def _request(server: Remote, path: str, body: Mapping[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    headers = {
        "host": f"{server.host}:{server.port}",
        "content-type": "application/json",
        "content-length": str(len(payload)),
        "connection": "close",
        **server.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + payload


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The reply's status, and whether its body comes in chunks."""
    first = (await reader.readline()).split()
    if len(first) < 2:
        raise EOFError
    chunked = False
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.lower().partition(b":")
        chunked = chunked or (name == b"transfer-encoding" and value.strip() == b"chunked")
    return int(first[1]), chunked


async def _events(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Server-sent events' data, as they come."""
    rest = b""
    async for part in _parts(reader, chunked):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA).strip()


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while part := await reader.read(1 << 16):
            yield part
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
