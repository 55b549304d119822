"""Whether servers can be used, asked at the start, so that what is wrong is said clearly then."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

from kvstrata.errors import ConfigError
from kvstrata.tiers.valkey.errors import (
    ReplyError,
    ServerBrokenError,
    ServerError,
    ServerRefusesError,
)
from kvstrata.tiers.valkey.figures import parse_info
from kvstrata.tiers.valkey.node import Node
from kvstrata.tiers.valkey.servers import Servers

PATIENCE = 3.0  # seconds for each server
_log = logging.getLogger("kvstrata.tiers")


def check_servers(servers: Servers) -> None:
    """Ask all servers whether they answer, let us in, and take a value.

    Raises ConfigError where one does not let us in or cannot be written to, and where none can be reached; if
    some can be, the others are only told about.
    """
    nodes = servers.nodes
    with ThreadPoolExecutor(max(1, len(nodes)), "kvstrata-valkey-check") as threads:
        outcomes = list(threads.map(lambda node: _outcome(servers, node), nodes))
    away = []
    for node, error in zip(nodes, outcomes, strict=True):
        if isinstance(error, ConfigError):
            raise error
        if isinstance(error, ServerRefusesError):
            raise ConfigError(
                f"valkey server {node.name} does not let us in ({error.reason}); set user=NAME and "
                "password=env:VARIABLE or password=file:PATH to what its ACL says"
            )
        if isinstance(error, ServerBrokenError):
            raise ConfigError(f"valkey server {node.name} is none: {error.reason}; check host and port")
        if error is not None:
            away.append((node, error))
    if away and len(away) == len(nodes):
        reasons = "; ".join(f"{node.name}: {error.reason}" for node, error in away)
        raise ConfigError(
            f"no valkey server can be reached ({reasons}); check host, port, tls and the network"
        )
    if servers.settings.cluster and not servers.ask_for_slots():
        raise ConfigError(
            f"valkey cluster of {nodes[0].name} does not say where its slots are; is it complete?"
        )
    for node, error in away:
        _log.warning("valkey server %s cannot be reached: %s; it is tried again", node.name, error.reason)


def _outcome(servers: Servers, node: Node) -> ServerError | ConfigError | None:
    settings = servers.settings
    name = f"{settings.prefix}:probe:{{{os.urandom(8).hex()}}}"
    try:
        info, put = node.execute([("INFO",), ("SET", name, b"", "PX", 1000)], PATIENCE)
    except ServerError as error:
        return error
    fields = parse_info(info)
    if settings.cluster != (fields.get("cluster_enabled") == "1") and fields:
        kind, scheme = ("a", "valkey+cluster") if not settings.cluster else ("no", "valkey")
        return ConfigError(f"valkey server {node.name} is part of {kind} cluster; use {scheme}://")
    if not isinstance(put, ReplyError):
        return None
    match put.code:
        case "READONLY":
            primary = f"{fields.get('master_host', '?')}:{fields.get('master_port', '?')}"
            return ConfigError(
                f"valkey server {node.name} is a read-only replica of {primary}; name the primary instead"
            )
        case "OOM":
            return ConfigError(
                f"valkey server {node.name} is out of memory: {fields.get('used_memory_human', '?')} used of "
                f"maxmemory {fields.get('maxmemory_human', '?')} with maxmemory-policy "
                f"{fields.get('maxmemory_policy', '?')}; set allkeys-lfu or allkeys-lru, or give it more"
            )
        case "NOPERM" | "NOAUTH":
            return ConfigError(
                f"valkey server {node.name} does not allow SET on keys {settings.prefix}:* ({put}); give the "
                "user +@read +@write +@keyspace +@connection +@scripting +info and these keys"
            )
        case "MOVED" | "ASK" | "CLUSTERDOWN" if settings.cluster:
            return None
        case _:
            return ConfigError(f"valkey server {node.name} does not take values: {put}")
