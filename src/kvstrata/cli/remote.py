"""A running server as commands see it: its address, the key for it, and what it tells when asked."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvstrata.errors import ConfigError, KVStrataError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVSTRATA_API_KEY"

UrlOption = Annotated[str, typer.Option("--url", help="Where the server listens.")]


class RemoteError(KVStrataError):
    """A server that does not answer, or not as ours does. status: what it answered with, if it did."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Remote:
    """A server. key: sent with each request, where there is one."""

    url: str
    host: str
    port: int
    tls: bool
    key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    def get(self, path: str, timeout: float = 5.0) -> str:
        """The body of a page. timeout: seconds. Raises RemoteError."""
        request = urllib.request.Request(self.url + path, headers=self.headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as reply:
                text: str = reply.read().decode("utf-8", "replace")
                return text
        except urllib.error.HTTPError as error:
            raise RemoteError(self._refusal(path, error.code), error.code) from error
        except (OSError, ValueError, HTTPException) as error:
            raise RemoteError(f"no server answers at {self.url} ({_reason(error)}); {_START}") from error

    def get_json(self, path: str, timeout: float = 5.0) -> dict[str, Any]:
        """The body of a page, a JSON object. Raises RemoteError."""
        text = self.get(path, timeout)
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RemoteError(f"what answers at {self.url} is no kvstrata server: {path} is no JSON object")
        return value

    def _refusal(self, path: str, status: int) -> str:
        if status in (401, 403):
            return f"the server at {self.url} wants an API key (status {status}): set {KEY_VARIABLE}"
        return f"the server at {self.url} answers {path} with status {status}"


_START = "start one with `kvstrata serve`, or give its address with --url"


def remote(url: str) -> Remote:
    """The server at an address, with the key from the environment. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _no_url(url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise _no_url(url)
    tls = parts.scheme == "https"
    return Remote(
        url=f"{parts.scheme}://{parts.netloc}",
        host=parts.hostname,
        port=port or (443 if tls else 80),
        tls=tls,
        key=os.environ.get(KEY_VARIABLE) or None,
    )


def _no_url(url: str) -> ConfigError:
    return ConfigError(f"--url is {url!r}; give the server's address alone, such as {DEFAULT_URL}")


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
