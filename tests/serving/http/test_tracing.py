"""Spans of real requests, by the in-memory exporter of OpenTelemetry's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from longtail.serving import create_app
from longtail.serving.errors import StateError
from longtail.serving.http.app import install_tracing
from tests.serving.client import client_of
from tests.serving.plane import plane_retriever, plane_settings

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_request_continues_its_callers_trace_and_probes_make_none(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path), retriever=plane_retriever())
    exporter = InMemorySpanExporter()
    install_tracing(app, SimpleSpanProcessor(exporter))
    with client_of(app) as client:
        client.get("/readyz")
        client.get("/v1/labels/a", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (span,) = exporter.get_finished_spans()
    assert span.kind.name == "SERVER"
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.name == "GET /v1/labels/{id:path}"


def test_without_the_packages_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.fastapi", None)
    with pytest.raises(StateError, match=r"longtail\[otel\]"):
        create_app(plane_settings(tmp_path, tracing=True), retriever=plane_retriever())
