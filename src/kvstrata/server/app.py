"""The application: all endpoints, every error in the field's shape, and the front around them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from kvstrata.server import cache_routes, generate, status
from kvstrata.server.docs_page import docs_page
from kvstrata.server.front import METRICS_PATH, Front, line_of
from kvstrata.server.metrics import CONTENT_TYPE, HttpCounts, Metrics
from kvstrata.server.problems import ApiError, api_error
from kvstrata.server.requests import UNKNOWN
from kvstrata.server.service import Service

_FEW_VALUES = 1 << 16  # in a body, beside the tokens of prompts
_SHOWN = 200  # characters of what a client sent that an error repeats


def create_app(service: Service, version: str) -> ASGIApp:
    """The ASGI application of a service. version: of kvstrata, for the description."""
    app = FastAPI(
        title="kvstrata",
        version=version,
        description="An OpenAI-compatible server in front of a KV-cache engine.",
        docs_url=None,
        redoc_url=None,
    )
    for part in (generate, status, cache_routes):
        app.include_router(part.router(service))

    http = HttpCounts()
    metrics = Metrics(service, http, version)

    # No coroutine: it runs in a thread, beside the event loop.
    @app.get(METRICS_PATH, tags=["status"], response_class=PlainTextResponse)
    def prometheus() -> Response:
        """Figures for Prometheus, in its text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return docs_page(app.openapi())

    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)
    return Front(
        app,
        service.keys,
        service.log,
        max_body=service.config.max_body_bytes,
        max_values=_FEW_VALUES + service.config.max_n * service.usual_prompt_tokens,
        body_timeout=service.config.body_timeout,
        clock=service.clock,
        on_answered=http.add,
        guards_metrics=service.guards_metrics,
    )


async def _on_error(request: Request, error: Exception) -> Response:
    told = api_error(error)
    line = line_of(request.scope)
    line.error = str(told) if isinstance(error, ApiError) else f"{type(error).__name__}: {error}"
    if told.status == 499:  # nobody is there to read it, but the log
        return Response(status_code=499)
    return told.response()


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return await _on_error(request, _no_json())
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place)[:_SHOWN] or None
    if first["type"] == "missing" and not place:
        message = "there is no JSON body; send one with 'Content-Type: application/json'"
    elif first["type"] == UNKNOWN:
        param = ".".join([*place, first["ctx"]["name"]])[:_SHOWN]
        message = f"{param}: {first['msg']}"
    else:
        message = f"{param or 'body'}: {first['msg']}"
    return await _on_error(request, ApiError(400, message, code="invalid_value", param=param))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:_SHOWN]
    if error.status_code == 404:
        return await _on_error(request, status.not_found(path))
    if error.status_code == 405:
        message = f"{path} does not take {method}; /docs lists what there is"
        return await _on_error(
            request, ApiError(405, message, code="method_not_allowed", headers=error.headers)
        )
    if error.status_code == 400:  # whatever else there is about a body: its UTF-8, its depth, its numbers
        return await _on_error(request, _no_json())
    return await _on_error(
        request, ApiError(error.status_code, str(error.detail), code="invalid_request", headers=error.headers)
    )


def _no_json() -> ApiError:
    return ApiError(
        400, "the body is no JSON that can be read; send UTF-8, not too deep", code="invalid_json"
    )
