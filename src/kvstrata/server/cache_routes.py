"""What operators see of the cache, and do to it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from kvstrata.cache.stats import CacheStats
from kvstrata.errors import StoppedError
from kvstrata.server.front import key_of
from kvstrata.server.problems import ApiError, api_error
from kvstrata.server.requests import PinRequest
from kvstrata.server.service import Service
from kvstrata.server.shapes import CacheUsage, Done, ErrorBody

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 500, "default")
}


def router(service: Service) -> APIRouter:
    """The endpoints about the cache."""
    routes = APIRouter(tags=["cache"], responses=_PROBLEMS)

    @routes.get("/v1/cache")
    async def cache() -> CacheUsage:
        """How full the cache is, and how much it has saved."""
        try:
            return _usage(service, await service.cache_stats())
        except StoppedError as error:
            raise api_error(error) from error

    @routes.post("/v1/cache/reset")
    async def reset(request: Request) -> Done:
        """Forget every cached block; requests being served go on. Needs the admin key."""
        _check_admin(service, request)
        try:
            await service.on_engine_thread(service.engine.reset_cache)
        except StoppedError as error:
            raise api_error(error) from error
        return {"status": "ok"}

    @routes.post("/v1/cache/pin")
    async def pin(request: Request, body: PinRequest) -> Done:
        """Keep a prompt's blocks from eviction. Needs the admin key."""
        _check_admin(service, request)
        raise _unsupported("pin")

    @routes.post("/v1/cache/unpin")
    async def unpin(request: Request, body: PinRequest) -> Done:
        """Undo a pin. Needs the admin key."""
        _check_admin(service, request)
        raise _unsupported("unpin")

    return routes


def _check_admin(service: Service, request: Request) -> None:
    key = key_of(request.scope)
    if key is None or not key.admin:
        raise ApiError(
            403,
            "this needs the admin key: send it as 'Authorization: Bearer KEY'"
            if service.keys.has_admin
            else "this needs an admin key, and the server has none; start it with --admin-key-file",
            code="admin_key_needed",
        )


def _unsupported(what: str) -> ApiError:
    return ApiError(
        400,
        f"{what} is not supported by this build; cached blocks stay while there is room",
        code="unsupported",
    )


def _usage(service: Service, stats: CacheStats) -> CacheUsage:
    total = sum(group.total for group in stats.groups)
    held = sum(group.held for group in stats.groups)
    free = sum(group.free for group in stats.groups)
    cached = sum(service.cached_tokens.values())
    scheduler = service.engine.scheduler
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
                "evictions": dict(group.evictions),
            }
            for group in stats.groups
        ],
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "preemptions": scheduler.preemptions,
        "prompt_tokens": service.prompt_tokens,
        "cached_tokens": dict(service.cached_tokens),
        "hit_ratio": cached / service.prompt_tokens if service.prompt_tokens else None,
    }
