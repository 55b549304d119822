"""Which servers a shared tier is on, changed while requests are served."""

from __future__ import annotations

from kvstrata.errors import ConfigError, RequestError
from kvstrata.server.service import Service
from kvstrata.tiers.valkey.tier import ValkeyTier


def reread(service: Service) -> None:
    """Have each shared tier read its file of members again, and log what came of it; none is harmless."""
    for tier in _tiers(service):
        try:
            changed, error = tier.reread(), None
        except ConfigError as refused:
            changed, error = False, str(refused)
        service.log.write("members", changed=changed, servers=servers_of(tier), error=error)


def change(service: Service, servers: str, weights: str | None) -> tuple[bool, list[str]]:
    """Give the shared tier other servers; whether that changed anything, and the servers now.

    Raises RequestError where there is no such tier, or the servers cannot be used.
    """
    tiers = _tiers(service)
    if len(tiers) != 1:
        raise RequestError(f"servers are for one valkey tier, and this server has {len(tiers)}")
    try:
        return tiers[0].set_servers(servers, weights), servers_of(tiers[0])
    except ConfigError as error:
        raise RequestError(str(error)) from error


def servers_of(tier: ValkeyTier) -> list[str]:
    """The names of the servers of a tier, in the order of the ring's members."""
    return tier.servers.members


def _tiers(service: Service) -> list[ValkeyTier]:
    tiering = service.engine.tiering
    return [] if tiering is None else [t for t in tiering.stack.tiers if isinstance(t, ValkeyTier)]
