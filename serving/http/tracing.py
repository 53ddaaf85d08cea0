"""OpenTelemetry, if asked for: a span for every request, sent where the OTEL_… variables say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from longtail.serving.errors import TracingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_UNTRACED = "livez,readyz,metrics"


def install_tracing(app: FastAPI, processor: SpanProcessor | None = None, model: str | None = None) -> None:
    """Trace every request but probes and scrapes; a caller's traceparent is continued.

    Args:
        app: whose requests.
        processor: gets the spans; by default they are sent in batches over OTLP/HTTP.
        model: the name of the application's model, where the process serves several: `longtail.model` of its resource.

    Raises:
        TracingError: the packages of the extra `otel` are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(
            f"tracing: expected the packages of the extra otel (pip install 'longtail[otel]'), found {error}"
        ) from error
    of_model = {} if model is None else {"longtail.model": model}
    resource = Resource({SERVICE_NAME: "longtail", **of_model}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, excluded_urls=_UNTRACED)
