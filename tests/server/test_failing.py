"""When the engine fails, requests end with an error, health tells it, and nothing hangs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import toy_server


@pytest.mark.parametrize("stream", [True, False])
def test_requests_being_served_when_a_step_fails_get_500_and_later_ones_too(stream: bool):
    with toy_server(gated=True) as server, ThreadPoolExecutor() as pool:
        assert server.gate is not None
        asked = [pool.submit(server.post, prompt="abc", stream=stream) for _ in range(3)]
        server.until(lambda: server.service.serving.open_requests == 3)
        server.until(lambda: server.gate is not None and server.gate.arrived > 0)
        server.toy.engine.scheduler.computed = lambda work: 1 / 0  # type: ignore[method-assign, assignment]
        server.gate.open()
        for answer in asked:
            assert answer.result().status_code == 500
            assert answer.result().json()["error"]["code"] == "engine_stopped"
        with server.client() as client:
            assert client.get("/health").status_code == 503
            assert client.get("/ready").status_code == 503
            assert client.get("/v1/cache").status_code == 500
        assert server.post(prompt="abc").status_code == 500
        assert server.service.admission.open == 0


def test_a_failure_in_the_middle_of_a_stream_is_told_in_it():
    body = {"prompt": "abc", "stream": True, "ignore_eos": True}
    with toy_server(gated=True) as server:
        assert server.gate is not None
        server.gate.let(3)
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            server.toy.engine.scheduler.computed = lambda work: 1 / 0  # type: ignore[method-assign, assignment]
            server.gate.open()
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_stopped"


def test_an_answer_that_is_not_finite_is_that_requests_error_alone():
    with toy_server() as server:
        server.toy.model.fail_on = ord("!") - 32
        assert server.post(prompt="abc!").status_code == 500
        assert server.post(prompt="abc").status_code == 200
        with server.client() as client:
            assert client.get("/health").status_code == 200
        server.until_idle()


def test_a_defect_of_an_endpoint_is_500_in_the_fields_shape_and_tells_nothing_inside(monkeypatch):
    with toy_server() as server:
        monkeypatch.setattr(server.service, "check_request", lambda *a: {}["a secret"])
        answer = server.post(prompt="abc")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        monkeypatch.undo()
        assert server.post(prompt="abc").status_code == 200


def test_a_stopping_server_sends_new_requests_away_and_finishes_the_others():
    with toy_server(gated=True) as server, ThreadPoolExecutor() as pool:
        assert server.gate is not None
        first = pool.submit(server.post, prompt="abc")
        server.until(lambda: server.service.serving.open_requests == 1)
        server.service.admission.draining = True
        refused = server.post(prompt="abc")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        with server.client() as client:
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        server.gate.open()
        assert first.result().status_code == 200
