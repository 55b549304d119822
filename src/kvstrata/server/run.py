"""The life of a server process: listen, serve, drain when asked to stop, let go of everything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from kvstrata.engine.llm import LLM
from kvstrata.errors import ConfigError
from kvstrata.server import membership
from kvstrata.server.app import create_app
from kvstrata.server.keys import KeyRing
from kvstrata.server.request_log import RequestLog
from kvstrata.server.service import Served, Service
from kvstrata.server.settings import ServerConfig
from kvstrata.server.tracing import Tracing
from kvstrata.server.wire import http_protocol, new_event_loop

_ABORT_GRACE = 5.0  # seconds for answers that were cut off to reach their clients
_SWITCH_INTERVAL = 0.0005  # seconds a thread may keep the interpreter from the engine's
_BACKLOG = 2048


def listen(config: ServerConfig) -> socket.socket:
    """A socket bound to the address: a taken port shows before a model is loaded, and so do TLS files that
    cannot be used. Raises ConfigError.
    """
    _check_tls(config)
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # a ValueError: no name of a host can be so
        raise ConfigError(f"host is {config.host!r}; it is no address of this machine: {error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port is {config.port}; {config.host} cannot listen there: {error.strerror}"
        ) from error
    return listener


def _check_tls(config: ServerConfig) -> None:
    if config.tls_cert is None:
        return
    try:
        # With an empty passphrase, since OpenSSL would ask the terminal for one and wait.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert is {config.tls_cert!r} and tls_key is {config.tls_key!r}; give PEM files of a "
            f"certificate and its key, without a passphrase: {error}"
        ) from error


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Where clients reach the server."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{config.scheme}://{host}:{listener.getsockname()[1]}"


def run(
    llm: LLM,
    config: ServerConfig,
    keys: KeyRing,
    listener: socket.socket,
    *,
    version: str,
    on_ready: Callable[[str], None],
) -> int:
    """Serve until a signal asks to stop; returns the exit code: 0, or 1 where the engine has failed.

    version: of kvstrata. on_ready: called with the model's name once requests are taken.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(llm, config, keys, listener, version=version, on_ready=on_ready))


def _spare_the_collector() -> None:
    """Take what is loaded out of Python's collector of cycles, for good.

    These are hundreds of thousands of objects, of torch above all. Going through them takes a tenth of a
    second, time and again, in which neither the engine nor the event loop gets on.
    """
    gc.collect()
    gc.freeze()


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would stop listening at once, and die of the signal in the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    llm: LLM,
    config: ServerConfig,
    keys: KeyRing,
    listener: socket.socket,
    *,
    version: str,
    on_ready: Callable[[str], None],
) -> int:
    log = RequestLog(sys.stderr, config.log_format)
    name = config.served_model_name or llm.loaded.path.stem
    service = Service(
        llm.engine,
        Served(name, llm.tokenizer, llm.loaded.chat_template, int(time.time())),
        config,
        keys,
        log,
        max_running=llm.config.max_num_seqs,
        tracing=None if config.otlp_endpoint is None else Tracing(config.otlp_endpoint, version),
    )
    server = _Server(
        uvicorn.Config(
            create_app(service, version),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http=http_protocol(),
            backlog=_BACKLOG,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            timeout_graceful_shutdown=int(_ABORT_GRACE),
        )
    )
    draining: list[asyncio.Task[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, number, service, server, draining)
    _spare_the_collector()
    rereading: set[asyncio.Future[None]] = set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _on_hangup, service, rereading)
    service.serving.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.005)
    if server.started:
        on_ready(name)
    await serving
    for task in draining:
        await task
    stopped = await asyncio.to_thread(service.serving.stop, _ABORT_GRACE)
    service.close()
    if service.tracing is not None:
        await asyncio.to_thread(service.tracing.close)
    if stopped and service.serving.error is None:
        llm.close()
    log.write("stopped", error=None if service.serving.error is None else repr(service.serving.error))
    log.close()
    return 0 if server.started and service.serving.error is None else 1


def _on_signal(
    number: signal.Signals, service: Service, server: uvicorn.Server, draining: list[asyncio.Task[None]]
) -> None:
    """The first signal drains; a second one ends the process where it stands."""
    if draining:
        os._exit(128 + number)
    draining.append(asyncio.create_task(_drain(number, service, server)))


def _on_hangup(service: Service, rereading: set[asyncio.Future[None]]) -> None:
    """Read the files of members again, beside all else."""
    task = asyncio.ensure_future(asyncio.to_thread(membership.reread, service))
    rereading.add(task)  # the loop itself does not hold on to it
    task.add_done_callback(rereading.discard)


async def _drain(number: signal.Signals, service: Service, server: uvicorn.Server) -> None:
    """Take no more requests, wait for those that run, cut off what is left, and have the server stop."""
    admission = service.admission
    admission.draining = True
    limit = service.config.drain_timeout
    service.log.write("draining", signal=number.name, open=admission.open, drain_timeout=limit)
    try:
        async with asyncio.timeout(limit):
            await admission.idle()
    except TimeoutError:
        service.log.write("aborting", open=admission.open)
        for call in tuple(service.calls):
            call.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_GRACE):
                await admission.idle()
    server.should_exit = True
