"""Every setting of the server, validated once at the edge, with its unit."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kvstrata.config import parse_bytes
from kvstrata.errors import ConfigError

LOG_FORMATS = ("json", "logfmt")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server. Raises ConfigError naming the field, its value and what would be right.

    host, port: where to listen (port 0: any free one). served_model_name: the model's name in requests
        (None: the file's name). insecure: listen on other addresses than loopback without API keys.
    api_key_file, admin_key_file, metrics_key_file: files with keys, see `keys`. open_metrics: /metrics needs
        no key, whatever keys there are. show_prefixes: /v1/cache tells the first words of the prompts found
        most often. share_cache: requests under different API keys find each other's blocks. min_priority:
        least `priority` a request may ask for (None: 0 with an API key, else anything).
    tls_cert, tls_key: PEM files; with them the server speaks HTTPS only.
    max_body: most bytes of a request's body. body_timeout: seconds in which it has to arrive.
    max_prompt_tokens: most tokens of a prompt (None: what fits the model and the pool). max_n: most answers a
        request may ask for, over all its prompts. max_queue: most requests that wait beyond those that run.
    max_requests_per_key: most requests that one API key may have open (None: any number).
    drain_timeout: seconds that requests have to finish after the first SIGTERM.
    log_format: `json` or `logfmt`, one line a request. log_prompts: prompts and answers go to the log.
    otlp_endpoint: URL of an OpenTelemetry collector that gets a span for each request (None: no traces).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    insecure: bool = False
    api_key_file: str | None = None
    admin_key_file: str | None = None
    metrics_key_file: str | None = None
    open_metrics: bool = False
    show_prefixes: bool = False
    share_cache: bool = False
    min_priority: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    max_body: str | int = "4MiB"
    body_timeout: float = 30.0
    max_prompt_tokens: int | None = None
    max_n: int = 16
    max_queue: int = 256
    max_requests_per_key: int | None = None
    drain_timeout: float = 30.0
    log_format: Literal["json", "logfmt"] = "json"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    max_body_bytes: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        _check(bool(self.host), "host", self.host, "give an address such as 127.0.0.1")
        _check_int("port", self.port, 0, 65535)
        _check_int("max_n", self.max_n, 1, 128)
        _check_int("max_queue", self.max_queue, 0, 1_000_000)
        for name in ("max_prompt_tokens", "max_requests_per_key"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, 2**31 - 1)
        if self.min_priority is not None:
            _check_int("min_priority", self.min_priority, -(2**31), 2**31 - 1)
        for name, low in (("body_timeout", 0.001), ("drain_timeout", 0.0)):
            value = getattr(self, name)
            ok = isinstance(value, int | float) and math.isfinite(value) and low <= value <= 1e6
            _check(ok, name, value, f"it must be a number of seconds from {low:g} to 1000000")
        _check(
            self.log_format in LOG_FORMATS,
            "log_format",
            self.log_format,
            f"choose one of {', '.join(LOG_FORMATS)}",
        )
        if self.otlp_endpoint is not None:
            parts = urlsplit(self.otlp_endpoint)
            _check(
                parts.scheme in ("http", "https") and bool(parts.netloc),
                "otlp_endpoint",
                self.otlp_endpoint,
                "give the URL of a collector, such as http://127.0.0.1:4318",
            )
        object.__setattr__(self, "max_body_bytes", parse_bytes(self.max_body, "max_body"))
        self._check_tls()

    def _check_tls(self) -> None:
        for name, other in (("tls_cert", self.tls_key), ("tls_key", self.tls_cert)):
            path = getattr(self, name)
            if path is None:
                _check(other is None, name, None, "TLS needs tls_cert and tls_key: give both or neither")
            else:
                _check(Path(path).is_file(), name, path, "there is no such file")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.tls_cert is None else "https"

    def check_exposure(self, *, has_keys: bool) -> None:
        """Raise ConfigError where strangers could use the server."""
        if not (self.loopback or has_keys or self.insecure):
            raise ConfigError(
                f"host is {self.host!r} and there are no API keys; other machines could use the server: "
                "give --api-key-file, or --insecure where that is wanted"
            )


def _check(ok: bool, name: str, value: object, right: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; {right}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _check(ok, name, value, f"it must be a whole number from {low} to {high}")
