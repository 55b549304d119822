"""What can be said of a Valkey tier: `valkey://host:port,host:port?replicas=2&ttl=1h`, validated once."""

from __future__ import annotations

import math
import os
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.tiers.ring import Member
from kvstrata.tiers.secret import signing_key
from kvstrata.tiers.url import TierUrl, parse_seconds

DEFAULT_PORT = 6379
DEFAULT_PREFIX = "kvstrata"
OPTIONS = (
    "replicas",
    "weights",
    "members",
    "ttl",
    "prefix",
    "timeout",
    "stall",
    "connections",
    "grace",
    "user",
    "password",
    "tls",
    "ca",
    "cert",
    "key",
    "hmac",
    "lease",
)
_MOST_CONNECTIONS = 64
_NAME = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?", re.ASCII
)


@dataclass(frozen=True)
class Server:
    """Where a server listens. weight: its share of the ring."""

    host: str
    port: int
    weight: float = 1.0

    @property
    def name(self) -> str:
        """What it is called on the ring, in logs and in metrics."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def member(self) -> Member:
        return Member(self.name, self.weight)


@dataclass(frozen=True)
class Credentials:
    """Who we are to the servers; never shown. user: of an ACL (None: the default user)."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Tls:
    """Files for TLS: the authorities that servers' certificates are checked against (None: the system's),
    and a certificate and key of our own.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """What connections are wrapped with. Raises ConfigError for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                # With an empty passphrase, since OpenSSL would ask the terminal for one and wait.
                context.load_cert_chain(self.cert, self.key, lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ca is {self.ca!r}, cert is {self.cert!r} and key is {self.key!r}; give PEM files, a key "
                f"without a passphrase: {error}"
            ) from None
        return context


@dataclass(frozen=True)
class ValkeySettings:
    """Settings of one Valkey tier.

    cluster: the servers form a Valkey Cluster, whose slots place keys. replicas: servers that keep each
    block. ttl: most seconds that a block is served (inf: as its request says). prefix: of all keys.
    timeout: seconds that a look-up or another small call may take, connecting included. stall: seconds that
    a load or store may wait for a byte to move. connections: to each server for bytes, and as many for small
    calls. grace: seconds for which a new membership asks the old owners, and one that was away those who
    stood in for it. members: a file with a server a line that takes the URL's place. signing_key: for HMAC.
    lease: whether processes agree on who computes what.
    """

    servers: tuple[Server, ...]
    cluster: bool = False
    replicas: int = 1
    ttl: float = math.inf
    prefix: str = DEFAULT_PREFIX
    timeout: float = 0.05
    stall: float = 0.5
    connections: int = 4
    grace: float = 600.0
    lease: bool = True
    members: Path | None = None
    credentials: Credentials = Credentials()
    tls: Tls | None = None
    signing_key: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: TierUrl) -> ValkeySettings:
        """The settings in a URL. Raises ConfigError naming the option, its value and what would be right."""
        if "@" in url.netloc:  # said without the URL, which holds a password
            raise ConfigError(
                f"a {url.scheme}:// tier names a user or password before @, which others could read; give "
                "user=NAME and password=env:VARIABLE or password=file:PATH as options"
            )
        url.reject_unknown(OPTIONS)
        if url.path.strip("/"):
            raise ConfigError(f"tier {url.text!r} has a path, {url.path!r}; servers only: valkey://host:port")
        options = url.options
        cluster = url.scheme == "valkey+cluster"
        members = Path(options["members"]) if "members" in options else None
        if members is not None and (url.netloc or "weights" in options or cluster):
            raise ConfigError(
                f"tier {url.text!r} has members beside servers, weights or a cluster; the file has all"
            )
        servers = read_servers(members) if members else parse_servers(url.netloc, options.get("weights"))
        if cluster and ("replicas" in options or "weights" in options):
            raise ConfigError(
                f"tier {url.text!r} sets replicas or weights; a cluster has its own: leave them out"
            )
        prefix = options.get("prefix", DEFAULT_PREFIX)
        if not re.fullmatch(r"[A-Za-z0-9._/-]{1,64}", prefix, re.ASCII):
            raise ConfigError(f"prefix is {prefix!r}; give 1 to 64 letters, digits and . _ / -")
        return cls(
            servers,
            cluster,
            replicas=_count("replicas", options.get("replicas", "1"), len(servers)),
            ttl=parse_seconds(options["ttl"], "ttl") if "ttl" in options else math.inf,
            prefix=prefix,
            timeout=_wait("timeout", options.get("timeout", "0.05")),
            stall=_wait("stall", options.get("stall", "0.5")),
            connections=_count("connections", options.get("connections", "4"), _MOST_CONNECTIONS),
            grace=parse_seconds(options.get("grace", "10m"), "grace"),
            members=members,
            credentials=Credentials(options.get("user"), _secret(options.get("password"))),
            tls=_tls(options),
            signing_key=signing_key(options["hmac"]) if "hmac" in options else None,
            lease=_switch("lease", options.get("lease", "on")),
        )

    def check_members(self, servers: tuple[Server, ...]) -> None:
        """Raise ConfigError for a membership that these settings cannot have."""
        if self.cluster:
            raise ConfigError("the members of a cluster are its own to say; change them there")
        if len(servers) < self.replicas:
            raise ConfigError(
                f"servers are {len(servers)}; replicas={self.replicas} needs as many: name more"
            )

    def with_servers(self, servers: tuple[Server, ...]) -> ValkeySettings:
        """The same for other servers."""
        return replace(self, servers=servers)


def read_servers(path: Path) -> tuple[Server, ...]:
    """Servers from a file: `host:port` a line, with a weight after it if it is not 1; # begins a comment.

    Raises ConfigError.
    """
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"members is {str(path)!r}, which cannot be read: {reason}") from None
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    lines = [words for words in lines if words]
    if not lines or any(len(words) > 2 for words in lines):
        raise ConfigError(
            f"members is {str(path)!r}; it must have lines such as cache-1:6379, or with a weight"
        )
    return parse_servers(
        ",".join(words[0] for words in lines),
        ",".join(words[1] if len(words) > 1 else "1" for words in lines),
    )


def parse_servers(text: str, weights: str | None = None) -> tuple[Server, ...]:
    """Servers from `host:port,host:port` and `2,1`. Raises ConfigError for what is none, or twice there."""
    shares = [1.0] * len(text.split(",")) if weights is None else [_weight(w) for w in weights.split(",")]
    servers: list[Server] = []
    for number, name in enumerate(text.split(",")):
        match = _NAME.fullmatch(name.strip())
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise ConfigError(f"server {name!r} is none; give host:port, several with commas between")
        if number >= len(shares):
            raise ConfigError(f"weights is {weights!r}; give one for each of the servers in {text!r}")
        servers.append(Server((match["v6"] or match["host"]).lower(), port, shares[number]))
    if len({server.name for server in servers}) < len(servers):
        raise ConfigError(f"servers are {text!r}, one of them twice; name each once")
    if len(shares) != len(servers):
        raise ConfigError(f"weights is {weights!r}; give one for each of the servers in {text!r}")
    return tuple(servers)


def _weight(text: str) -> float:
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3})?", text, re.ASCII) or not 0.1 <= float(text) <= 100:
        raise ConfigError(f"weights has {text!r}; give numbers from 0.1 to 100")
    return float(text)


def _count(name: str, text: str, most: int) -> int:
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise ConfigError(f"{name} is {text!r}; give a whole number from 1 to {most}")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise ConfigError(f"{name} is {text!r}; give on or off")
    return text == "on"


def _wait(name: str, text: str) -> float:
    """Seconds from `50ms`, `0.05` or `2s`."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*(ms|s|)", text, re.ASCII)
    seconds = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else 0.0
    if not 0.001 <= seconds <= 60:
        raise ConfigError(f"{name} is {text!r}; give a time from 1ms to 60s")
    return seconds


def _secret(source: str | None) -> str | None:
    """A password from `env:NAME` or `file:PATH`; messages never hold what might be one."""
    if source is None:
        return None
    kind, _, place = source.partition(":")
    if kind == "env" and place:
        if place not in os.environ:
            raise ConfigError(f"password is env:{place}, but the environment has no {place}; set it")
        return os.environ[place]
    if kind == "file" and place:
        try:
            return Path(place).read_text().strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"password is file:{place}, which cannot be read: {reason}") from None
    raise ConfigError("password is neither env:NAME nor file:PATH; say where it is, not what it is")


def _tls(options: dict[str, str]) -> Tls | None:
    wanted = options.get("tls", "0")
    if wanted not in ("0", "1"):
        raise ConfigError(f"tls is {wanted!r}; give 1 or 0")
    if wanted == "0":
        for name in ("ca", "cert", "key"):
            if name in options:
                raise ConfigError(f"{name} is {options[name]!r} without tls; give tls=1 too")
        return None
    if ("cert" in options) != ("key" in options):
        raise ConfigError("one of cert and key is given; give both or neither")
    return Tls(options.get("ca"), options.get("cert"), options.get("key"))
