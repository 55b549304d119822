"""Servers for tests: a real process, and a toy engine behind real sockets in this process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import uvicorn
from toy import Toy, make_toy, toy_tokenizer

from kvstrata.models.chat import ChatTemplate
from kvstrata.server.app import create_app
from kvstrata.server.keys import KeyRing
from kvstrata.server.request_log import RequestLog
from kvstrata.server.run import listen, url_of
from kvstrata.server.service import Served, Service
from kvstrata.server.settings import ServerConfig
from kvstrata.server.wire import http_protocol, new_event_loop

START = 120.0  # seconds, generous: it is there to end a hang
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}/{% endfor %}"


class ServerProcess:
    """`kvstrata serve` in a process of its own, on a free port of this machine."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "kvstrata", "serve", "--port", "0", "--json", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},  # as most people's Python
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            self._reader.join(START)
            raise AssertionError("the server did not start:\n" + "".join(self.lines))
        self.info: dict[str, Any] = json.loads(first)
        self.url: str = self.info["url"]
        self.model: str = self.info["model"]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def logged(self, event: str = "request") -> list[dict[str, Any]]:
        """The log's lines of one kind, so far."""
        entries = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code; the log is complete then."""
        code = self.process.wait(START)
        self._reader.join(START)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.signal()
        try:
            return self.wait()
        finally:
            if self.process.poll() is None:
                self.process.kill()


class StepGate:
    """Lets an engine's steps pass one by one, or all."""

    def __init__(self, toy: Toy) -> None:
        self._passes = threading.Semaphore(0)
        self._open = threading.Event()
        self.arrived = 0  # steps that have come to the gate
        inner = toy.model.forward

        def forward(batch: Any) -> Any:
            if not self._open.is_set():
                self.arrived += 1
                assert self._passes.acquire(timeout=START)
            return inner(batch)

        toy.model.forward = forward  # type: ignore[method-assign]

    def let(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._passes.release()

    def open(self) -> None:
        self._open.set()
        self._passes.release(1000)


@dataclass
class ToyServer:
    """The toy engine behind HTTP. gate: where its steps wait, if they are to."""

    toy: Toy
    service: Service
    url: str
    gate: StepGate | None
    log: io.StringIO = field(repr=False, default_factory=io.StringIO)

    def client(self, key: str = "none") -> httpx2.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.url, timeout=START, headers=headers)

    def post(self, path: str = "/v1/completions", key: str = "none", **body: Any) -> httpx2.Response:
        with self.client(key) as client:
            return client.post(path, json=body)

    def until(self, condition: Any) -> None:
        """Wait until something holds, however long it takes short of a hang."""
        for _ in range(int(START * 200)):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError("it never came to hold")

    def until_idle(self) -> None:
        """Wait until nothing is open, and see that every block came back."""
        self.until(lambda: self.service.admission.open == 0 and self.service.serving.open_requests == 0)
        self.service.serving.call(self.toy.assert_idle).result(START)

    def entries(self) -> list[dict[str, Any]]:
        """The request lines of the log so far."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A bare connection; the system keeps about so many bytes that are not read."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(START)
        connection.connect((host, int(port)))
        return connection


def request_bytes(body: bytes, path: str = "/v1/completions", headers: str = "") -> bytes:
    """A POST request as it goes over the wire."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def toy_server(
    *, keys: KeyRing | None = None, gated: bool = False, settings: dict[str, Any] | None = None, **toy: Any
) -> Iterator[ToyServer]:
    """A server of the toy engine, in a thread; stopped, with its answers cut off, at the end."""
    config = ServerConfig(port=0, **(settings or {}))
    engine = make_toy(**{"token_budget": 64, **toy})
    gate = StepGate(engine) if gated else None
    started, stop = threading.Event(), threading.Event()
    made: list[ToyServer] = []
    stream = io.StringIO()

    async def serve() -> None:
        log = RequestLog(stream, config.log_format)
        served = Served("toy", toy_tokenizer(), ChatTemplate(TEMPLATE), 0)
        service = Service(
            engine.engine, served, config, keys or KeyRing(), log, max_running=16, clock=engine.clock
        )
        service.serving.start()
        listener = listen(config)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(service, "0"),
                log_config=None,
                http=http_protocol(),
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        made.append(ToyServer(engine, service, url_of(config, listener), gate, stream))
        started.set()
        await asyncio.to_thread(stop.wait)
        if gate is not None:
            gate.open()
        for call in tuple(service.calls):
            call.abort()
        server.should_exit = True
        await task
        service.serving.stop(START)
        service.close()
        log.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(START)
    try:
        yield made[0]
    finally:
        stop.set()
        thread.join(START)
