"""What operators see of the cache, and do to it."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from kvstrata.cache.stats import CacheStats
from kvstrata.engine.block_life import Prefix
from kvstrata.errors import KVStrataError
from kvstrata.server import membership, pinning
from kvstrata.server.front import key_of
from kvstrata.server.problems import ApiError, api_error
from kvstrata.server.requests import MembersRequest, PinRequest, ResetRequest
from kvstrata.server.service import Service
from kvstrata.server.shapes import (
    CacheUsage,
    ErrorBody,
    MembersChanged,
    Pinned,
    PrefixUsage,
    ResetDone,
    TierUsageBody,
    Unpinned,
)
from kvstrata.server.tier_metrics import Named

T = TypeVar("T")
_TIER_WAIT = 0.05  # seconds for each tier to tell what it holds
_CLEAR_SECONDS = 10.0
_TOP = 20
_WORDS = 8

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 429, 500, 503, "default")
}


def router(service: Service) -> APIRouter:
    """The endpoints about the cache."""
    routes = APIRouter(tags=["cache"], responses=_PROBLEMS)

    @routes.get("/v1/cache")
    async def cache(request: Request) -> CacheUsage:
        """How full the cache is, and how much it has saved."""
        stats, top = await _told(service.on_engine_thread(partial(_look, service)))
        tiers = await service.in_text_thread(service.tier_stats, _TIER_WAIT)
        usage = _usage(service, stats, tiers)
        # Other tenants' prompts are nobody's business, and neither is how often they are used.
        if not service.keys.required or _is_admin(request):
            usage["top_prefixes"] = [_prefix(service, prefix) for prefix in top]
        return usage

    @routes.post("/v1/cache/reset")
    async def reset(request: Request, body: ResetRequest | None = None) -> ResetDone:
        """Forget every cached block; requests being served go on. Needs the admin key."""
        _check_admin(service, request)
        await _told(service.on_engine_thread(service.engine.reset_cache))
        tiering = service.engine.tiering
        if body is None or not body.tiers or tiering is None:
            return {"status": "ok", "tiers": False, "silent": []}
        # Beside the engine: a tier that hangs holds up nobody's answers.
        silent = await service.in_text_thread(tiering.stack.clear, _CLEAR_SECONDS)
        return {"status": "ok", "tiers": not silent, "silent": silent}

    @routes.post("/v1/cache/members")
    async def members(request: Request, body: MembersRequest) -> MembersChanged:
        """Give the valkey tier other servers; requests being served go on. Needs the admin key."""
        _check_admin(service, request)
        changed, servers = await _told(
            service.in_text_thread(membership.change, service, body.servers, body.weights)
        )
        return {"status": "ok", "changed": changed, "servers": servers}

    @routes.post("/v1/cache/pin")
    async def pin(request: Request, body: PinRequest) -> Pinned:
        """Compute a prompt if need be, and keep its blocks from eviction. Needs the admin key."""
        _check_admin(service, request)
        return {"status": "ok", "tokens": await _told(pinning.pin(service, request, body))}

    @routes.post("/v1/cache/unpin")
    async def unpin(request: Request, body: PinRequest) -> Unpinned:
        """Undo a pin. Needs the admin key."""
        _check_admin(service, request)
        return {"status": "ok", "found": await _told(pinning.unpin(service, request, body))}

    return routes


async def _told(outcome: Awaitable[T]) -> T:
    """An outcome; errors of ours are told to the client."""
    try:
        return await outcome
    except KVStrataError as error:
        raise api_error(error, {**PinRequest.model_fields, **MembersRequest.model_fields}) from error


def _is_admin(request: Request) -> bool:
    key = key_of(request.scope)
    return key is not None and key.admin


def _check_admin(service: Service, request: Request) -> None:
    if not _is_admin(request):
        raise ApiError(
            403,
            "this needs the admin key: send it as 'Authorization: Bearer KEY'"
            if service.keys.has_admin
            else "this needs an admin key, and the server has none; start it with --admin-key-file",
            code="admin_key_needed",
        )


def _look(service: Service) -> tuple[CacheStats, list[Prefix]]:
    """Runs on the engine's thread."""
    return service.engine.cache.stats(), service.engine.telemetry.blocks.top_prefixes(_TOP)


def _prefix(service: Service, prefix: Prefix) -> PrefixUsage:
    told: PrefixUsage = {"key": prefix.key.hex()[:16], "tokens": prefix.tokens, "hits": prefix.hits}
    if service.config.show_prefixes:
        told["first_words"] = " ".join(service.served.tokenizer.decode(prefix.first).split()[:_WORDS])
    return told


def _usage(service: Service, stats: CacheStats, tiers: Named) -> CacheUsage:
    total = sum(group.total for group in stats.groups)
    held = sum(group.held for group in stats.groups)
    free = sum(group.free for group in stats.groups)
    cached = sum(service.cached_tokens.values())
    engine = service.engine
    return {
        "usage": held / total,
        "filled": (total - free) / total,
        "block_size": stats.block_size,
        "pool": [
            {
                "total_blocks": group.total,
                "free_blocks": group.free,
                "cached_blocks": group.cached,
                "held_blocks": group.held,
                "total_bytes": group.total * pool.layout.stride_bytes,
                "evictions": dict(group.evictions),
            }
            for group, pool in zip(stats.groups, engine.cache.pools, strict=True)
        ],
        "tiers": [
            TierUsageBody(
                name=name,
                state=each.state,
                used_bytes=each.usage.used_bytes,
                capacity_bytes=each.usage.capacity_bytes,
                blocks=each.usage.records,
                stored_blocks=each.usage.stores,
                loaded_blocks=each.usage.loads,
                evictions=dict(each.usage.evictions),
                servers={server.name: server.state for server in each.usage.servers},
            )
            for name, each in tiers
        ],
        "requests_running": len(engine.scheduler.running),
        "requests_waiting": len(engine.scheduler.waiting),
        "preemptions": engine.scheduler.preemptions,
        "prompt_tokens": service.prompt_tokens,
        "cached_tokens": dict(service.cached_tokens),
        "hit_ratio": cached / service.prompt_tokens if service.prompt_tokens else None,
        "recent_hit_ratio": engine.telemetry.hit_ratio,
        "eviction_rate": engine.telemetry.eviction_rate,
        "thrashed_tokens": engine.telemetry.blocks.thrashed,
    }
