"""Requests drawn from the served OpenAPI description, valid and not: none is answered with 5xx."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from scale import scaled
from schemathesis import GenerationMode
from served import START, ToyServer, toy_server

from kvstrata.server.keys import KeyRing, parse_keys

ADMIN = "admin-secret"
OPERATIONS = [
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/cache"),
    ("GET", "/metrics"),
    ("POST", "/v1/cache/reset"),
    ("POST", "/v1/cache/pin"),
    ("POST", "/v1/cache/unpin"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ToyServer]:
    with toy_server(keys=KeyRing((), parse_keys([ADMIN], "test", "admin")[0])) as server:
        yield server
        server.until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_drawn_from_the_schema_is_answered_with_5xx(
    server: ToyServer, method: str, path: str, mode: GenerationMode
):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path][method]

    @settings(
        max_examples=scaled(400, 25),
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        answer = case.call(headers={"authorization": f"Bearer {ADMIN}"}, timeout=START)
        assert answer.status_code < 500, answer.text

    with contextlib.suppress(Unsatisfiable):  # some operations can only be asked rightly
        ask()


def test_the_description_has_every_endpoint(server: ToyServer):
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    statuses = {
        status for methods in paths.values() for told in methods.values() for status in told["responses"]
    }
    assert "422" not in statuses
    assert set(paths) == {
        "/health",
        "/ready",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/cache",
        "/v1/cache/reset",
        "/v1/cache/pin",
        "/v1/cache/unpin",
        "/v1/cache/members",
    }
