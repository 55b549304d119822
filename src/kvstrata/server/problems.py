"""Errors as the field's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from starlette.responses import Response

from kvstrata.errors import KVStrataError, OverloadedError, StoppedError

_LONGEST = 1000  # characters of a message, to the client and in the log
CLIENT_CLOSED = 499  # for the log: nobody is there any more to see a status

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIELD = re.compile(r"([a-z_]+)[a-z0-9_.\[\]]*(?=:? )")  # our messages begin with the field's name


class ApiError(Exception):
    """A request that is answered with an error.

    code: what clients branch on (`model_not_found`). param: the field at fault. retry_after: seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_short(message))
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    def body(self) -> dict[str, Any]:
        """The error as clients read it."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The error as a response."""
        # ASCII escapes: what a client sent may hold what UTF-8 cannot.
        return Response(
            json.dumps(self.body()), self.status, headers=self.headers, media_type="application/json"
        )


def _short(message: str) -> str:
    """A message without the middle of what a client sent, which may have millions of characters."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"


def api_error(error: Exception, fields: Container[str] = ()) -> ApiError:
    """What a client is told of an error of ours: whose mistake it is, and which one's of these fields."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, StoppedError):
        return ApiError(500, str(error), code="engine_stopped")
    if isinstance(error, KVStrataError):
        match = _FIELD.match(str(error))
        param = match[0] if match is not None and match[1] in fields else None
        return ApiError(400, str(error), code="invalid_value", param=param)
    return ApiError(500, "the server has made a mistake; its log tells more", code="internal_error")
