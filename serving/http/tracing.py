"""Create OpenTelemetry spans of traced requests, after their answers were sent."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from random import random

from longtail.serving.monitoring.outcomes import REFUSED_ROUTE, UNKNOWN_ROUTE

_UNTRACED = {"/livez", "/readyz", "/metrics"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_SERVER_ERROR = 500
_CALLER, _STATE = b"traceparent", b"tracestate"
_VALID = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1

_UNROUTED = UNKNOWN_ROUTE, REFUSED_ROUTE


class Tracing:
    """Creates spans that continue a caller's trace.

    A request with a caller's trace is traced if the caller sampled it; other requests are sampled here, because a
    sampler of OpenTelemetry takes at least 10 µs per request. Probes and scrapes get no spans.

    Args:
        share: share of the requests without a caller's trace that get a span.
    """

    def __init__(self, share: float) -> None:
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({SERVICE_NAME: "longtail"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("longtail.serving")
        self._propagator, self._root, self._share = TraceContextTextMapPropagator(), Context(), share
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def record(
        self, method: str, route: str, status: int, seconds: float, headers: Mapping[bytes, bytes], request_id: str
    ) -> None:
        """Create the span of a request that has just ended.

        Args:
            route: pattern of the request's path, UNKNOWN_ROUTE or REFUSED_ROUTE.
        """
        caller = _VALID.fullmatch(headers.get(_CALLER, b""))  # an invalid trace counts as none [W3C]
        sampled = random() < self._share if caller is None else int(caller[1], 16) & _SAMPLED
        if not sampled or route in _UNTRACED:
            return
        # The span is made at the end, when the route is known, and dated back.
        ended, context = time.time_ns(), self._root
        if caller is not None:
            sent = {"traceparent": caller[0], "tracestate": headers.get(_STATE, b"")}
            context = self._propagator.extract({name: value.decode("latin-1") for name, value in sent.items()}, context)
        method = method if method in _METHODS else "_OTHER"
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "http.response.status_code": status,
            "longtail.request_id": request_id,
        }
        if route not in _UNROUTED:
            attributes["http.route"] = route
        span = self._tracer.start_span(
            method if route in _UNROUTED else f"{method} {route}",
            context,
            self._kind,
            attributes,
            start_time=ended - int(seconds * 1e9),
        )
        if status >= _SERVER_ERROR:
            span.set_status(self._failed)
        span.end(ended)

    def close(self) -> None:
        """Send the spans that still wait."""
        self._provider.shutdown()
