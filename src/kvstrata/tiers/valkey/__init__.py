"""The tier on Valkey servers: `valkey://host:port,host:port?replicas=2&ttl=1h`.

Plain values on ordinary Valkey (or Redis) servers. A ring places the segments of chains (`tiers.ring`), so
that what belongs together is one pipelined round trip to each server. Parts: `settings` (the URL), `stream`,
`resp` and `connection` (bytes to replies), `node` (one server: connections, breaker, figures), `servers` (all
of them), `names` (what keys are called).

Small calls about a segment (leases) go to the server that keeps its blocks::

    servers: Servers                          # ValkeyTier.servers
    names: Names                              # ValkeyTier.names
    name = servers.owner(segment)             # None: no server is up, compute without a lease
    key = names.lease(segment)                # has the segment's hash tag
    [won] = servers.execute(name, [("SET", key, owner_id, "NX", "PX", 3000)])   # b"OK" or None
    replies = servers.execute(name, [script(RELEASE, [key], [owner_id]), ("PTTL", key)])

`segment` is `KeyChain.segment(position)`: bytes that all blocks of a segment have in common. `execute` raises
`ServerError`: `ServerDownError` (refused, hung up), `ServerTimeoutError`, `ServerRefusesError` (password),
`ServerBrokenError` (no Valkey), `ServerAvoidedError` (its breaker is open, or all connections are in use). It
takes `settings.timeout` seconds at most (50 ms), or the `timeout` given; a command that fails alone is a
`ReplyError` value among the replies. Calls are thread-safe and wait for one of `settings.connections`, so
they should be short and pipelined, and polling should be one call for many keys. After an error the commands
may have been executed or not: value leases by a random owner id and compare in scripts.
"""

from kvstrata.tiers.valkey.errors import (
    ReplyError,
    ServerAvoidedError,
    ServerBrokenError,
    ServerDownError,
    ServerError,
    ServerRefusesError,
    ServerTimeoutError,
)
from kvstrata.tiers.valkey.names import Names
from kvstrata.tiers.valkey.resp import Command, Reply, script
from kvstrata.tiers.valkey.servers import Servers
from kvstrata.tiers.valkey.settings import Server, ValkeySettings

__all__ = [
    "Command",
    "Names",
    "Reply",
    "ReplyError",
    "Server",
    "ServerAvoidedError",
    "ServerBrokenError",
    "ServerDownError",
    "ServerError",
    "ServerRefusesError",
    "ServerTimeoutError",
    "Servers",
    "ValkeySettings",
    "script",
]
