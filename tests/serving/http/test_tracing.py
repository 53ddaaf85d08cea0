"""Spans of real requests, as a collector receives them over OTLP/HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from longtail.serving import create_app
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """Takes batches of spans; `spans` has each, `services` the names of who sent them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.services: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        batch = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in batch.resource_spans:
            self.server.services |= {
                item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
            }
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Span) -> dict[str, str | int]:
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


def test_a_request_continues_its_callers_trace_and_probes_make_none(tmp_path: Path, collector: Collector) -> None:
    app = create_app(plane_settings(tmp_path, tracing=1e-9), retriever=plane_retriever())
    with open_client(app) as client:
        caller = f"00-{TRACE}-{PARENT}-01"
        client.get("/readyz", headers={"traceparent": caller})
        client.get("/v1/labels/a", headers={"traceparent": caller, "x-request-id": "r1"})
        client.get("/nowhere", headers={"traceparent": caller})
        client.get("/v1/labels/b", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        for _ in range(3):
            for what in ("", "garbage", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"):
                client.get("/v1/labels/c", headers={"traceparent": what})
    span, unmatched = collector.spans  # all was sent when the service had stopped
    assert collector.services == {"longtail"}
    assert (span.name, span.kind) == ("GET /v1/labels/{id:path}", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(span) == {
        "http.request.method": "GET",
        "http.route": "/v1/labels/{id:path}",
        "http.response.status_code": 200,
        "longtail.request_id": "r1",
    }
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert (unmatched.name, attributes(unmatched)["http.response.status_code"]) == ("GET", 404)
    assert unmatched.status.code == Status.STATUS_CODE_UNSET


@pytest.mark.parametrize(("share", "least", "most"), [(0.1, 3, 90), (1.0, 300, 300)])  # but for one run in 10¹⁰
def test_of_requests_without_a_callers_trace_a_share_is_traced(
    share: float, least: int, most: int, tmp_path: Path, collector: Collector
) -> None:
    app = create_app(plane_settings(tmp_path, tracing=share), retriever=plane_retriever())
    with open_client(app) as client:
        for _ in range(300):
            client.get("/v1/labels/a")
    assert least <= len(collector.spans) <= most
    assert len({span.trace_id for span in collector.spans}) == len(collector.spans)
    assert not any(span.parent_span_id for span in collector.spans)


def test_what_breaks_the_service_is_an_error_of_the_span(tmp_path: Path, collector: Collector) -> None:
    app = create_app(plane_settings(tmp_path, tracing=1), retriever=plane_retriever())
    app.state.service = None
    with open_client(app) as client:
        assert client.get("/v1/labels/a").status_code == 500
    (span,) = collector.spans
    assert span.status.code == Status.STATUS_CODE_ERROR
