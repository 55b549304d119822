"""OpenTelemetry traces: what a collector gets, and that one which fails costs nobody an answer."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from served import toy_server

from kvstrata.errors import ConfigError
from kvstrata.server.settings import ServerConfig
from kvstrata.server.tracing import Tracing, check_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    posted: list[tuple[str, bytes]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.posted.append((self.path, body))
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    handler = type("Kept", (Collector,), {"posted": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def endpoint(server: http.server.ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def spans(server: http.server.ThreadingHTTPServer) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for path, body in server.RequestHandlerClass.posted:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            found += [span for scope in resource.scope_spans for span in scope.spans]
    return found


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_each_request_is_a_span_with_its_phases(collector):
    with toy_server() as server:
        tracing = server.service.tracing = Tracing(endpoint(collector), "0")
        with server.client() as client:
            client.post(
                "/v1/completions",
                json={"prompt": "abcdef", "max_tokens": 3, "temperature": 0},
                headers={"traceparent": PARENT},
            )
        server.post(path="/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=True)
        server.post(prompt="a" * 5000)
        server.until_idle()
        tracing.close()
    completion, chat, refused = spans(collector)
    assert completion.name == "text_completion toy"
    assert completion.trace_id.hex() == PARENT.split("-")[1]
    assert completion.parent_span_id.hex() == PARENT.split("-")[2]
    told = attributes(completion)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.usage.input_tokens"] == 6
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.request.max_tokens"] == 3
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0
    assert "abcdef" not in str(completion)
    assert next(event.name for event in completion.events) == "queue"
    assert completion.start_time_unix_nano <= completion.end_time_unix_nano
    assert chat.name == "chat toy"
    assert not chat.parent_span_id
    assert attributes(refused)["error.type"] == "context_length_exceeded"


@pytest.mark.parametrize("status", [400, 503])
def test_a_collector_that_refuses_costs_nobody_an_answer(collector, status: int):
    collector.RequestHandlerClass.status = status
    with toy_server() as server:
        tracing = server.service.tracing = Tracing(endpoint(collector), "0")
        assert server.post(prompt="abc").status_code == 200
        server.until_idle()
        tracing.close()


def test_what_fails_while_a_span_is_made_costs_nobody_an_answer(collector, monkeypatch):
    with toy_server() as server:
        tracing = server.service.tracing = Tracing(endpoint(collector), "0")
        monkeypatch.setattr(tracing, "_tracer", None)
        assert server.post(prompt="abc").status_code == 200
        assert server.post(prompt="abc", stream=True).text.endswith("[DONE]\n\n")
        server.until_idle()
        tracing.close()
    assert spans(collector) == []


@pytest.mark.parametrize("url", ["", "127.0.0.1:4318", "grpc://host:4317", "http://"])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match="otlp_endpoint is"):
        ServerConfig(otlp_endpoint=url)


def test_without_the_extra_its_name_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[otel\]'"):
        check_tracing()
