"""What tells about the server: whether it lives, whether it takes requests, and which model it has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from kvstrata.server.problems import ApiError
from kvstrata.server.service import Service
from kvstrata.server.shapes import ErrorBody, Live, ModelCard, ModelList

_FAILING: dict[int | str, dict[str, Any]] = {503: {"model": Live}}


def router(service: Service) -> APIRouter:
    """The endpoints that tell."""
    routes = APIRouter(tags=["status"])

    @routes.get("/health", responses={200: {"model": Live}, **_FAILING})
    async def health() -> JSONResponse:
        """Whether the server works; where not, it has to be restarted."""
        live = service.serving.healthy
        return JSONResponse({"status": "ok" if live else "failed"}, 200 if live else 503)

    @routes.get("/ready", responses={200: {"model": Live}, **_FAILING})
    async def ready() -> JSONResponse:
        """Whether the server takes new requests."""
        if not service.serving.healthy:
            return JSONResponse({"status": "failed"}, 503)
        draining = service.admission.draining
        return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)

    @routes.get("/v1/models", responses={401: {"model": ErrorBody}})
    async def models() -> ModelList:
        """The models that are served."""
        return {"object": "list", "data": [_card(service)]}

    @routes.get(
        "/v1/models/{name:path}",
        responses={status: {"model": ErrorBody} for status in (401, 404, "default")},
    )
    async def model(name: str) -> ModelCard:
        """One model."""
        service.check_model(name)
        return _card(service)

    return routes


def _card(service: Service) -> ModelCard:
    return {
        "id": service.served.name,
        "object": "model",
        "created": service.served.created,
        "owned_by": "kvstrata",
        "max_model_len": service.engine.max_model_len,
    }


def not_found(path: str) -> ApiError:
    """The error for a path that there is not."""
    return ApiError(404, f"there is no {path}; /docs lists what there is", code="not_found")
