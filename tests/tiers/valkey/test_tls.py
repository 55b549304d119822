"""TLS: values go through it, certificates are checked, and a client's is shown where the server wants one."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from stored import CONTEXT, HIT, blocks, drops, misses
from valkey_servers import ValkeyServer, found

from kvstrata.errors import ConfigError
from kvstrata.tiers.open import open_tier
from kvstrata.tiers.tier import StoreContext

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *names],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder


class TlsFront:
    """Takes TLS connections and passes what is in them to a server without TLS."""

    def __init__(self, server: ValkeyServer, folder: Path) -> None:
        self._target = server.port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self._context.load_verify_locations(folder / "cert.pem")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            client = self._context.wrap_socket(plain, server_side=True)
            with client:
                while True:
                    client.settimeout(0.002)
                    with suppress(TimeoutError):
                        data = client.recv(1 << 20)
                        if not data:
                            return
                        server.sendall(data)
                    client.settimeout(None)
                    while select.select([server], [], [], 0)[0]:
                        data = server.recv(1 << 20)
                        if not data:
                            return
                        client.sendall(data)


@pytest.fixture
def front(valkeys: list[ValkeyServer], certificate: Path) -> Iterator[TlsFront]:
    made = TlsFront(valkeys[0], certificate)
    yield made
    made.close()


def test_large_and_small_values_go_through_tls(front: TlsFront, certificate: Path) -> None:
    context = StoreContext(CONTEXT.fingerprint, 16, (1 << 20,))
    pem = certificate / "cert.pem"
    ours = f"ca={pem}&cert={pem}&key={certificate / 'key.pem'}"
    tier = open_tier(f"valkey://127.0.0.1:{front.port}?tls=1&{ours}&timeout=2s&stall=9s", context)
    records = blocks(6, context=context)
    assert drops(tier, records) == [None] * 6
    assert all(found(tier, records))
    assert misses(tier, records) == [HIT] * 6
    tier.close()


def test_a_certificate_that_nobody_vouches_for_is_told(front: TlsFront, certificate: Path) -> None:
    with pytest.raises(ConfigError, match="certificate verify failed"):
        open_tier(f"valkey://127.0.0.1:{front.port}?tls=1", CONTEXT)


def test_a_plain_connection_to_a_tls_port_and_a_lacking_file_are_told(
    front: TlsFront, certificate: Path
) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{front.port}"):
        open_tier(f"valkey://127.0.0.1:{front.port}", CONTEXT)
    with pytest.raises(ConfigError, match="give PEM files"):
        open_tier(f"valkey://127.0.0.1:{front.port}?tls=1&ca=/no/such/file", CONTEXT)
