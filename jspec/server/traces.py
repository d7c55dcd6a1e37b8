"""Spans of requests for OpenTelemetry, with the attributes that vLLM gives them."""

from collections.abc import Mapping
from typing import Any

from opentelemetry import propagate
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind

from jspec.server.gate import trace_headers


class Tracer:
    """Exports a span for each request; its parent is that of the header ``traceparent``.

    Args:
      exporter: of OpenTelemetry.
    """

    def __init__(self, exporter: SpanExporter):
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jspec"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jspec.server")

    def record(self, begin: int, end: int, attributes: Mapping[str, Any]) -> None:
        """Export a span, from ``begin`` to ``end`` in nanoseconds since 1970."""
        parent = propagate.extract(trace_headers.get())
        options = dict(context=parent, kind=SpanKind.SERVER, start_time=begin)
        span = self._tracer.start_span("llm_request", attributes=dict(attributes), **options)
        span.end(end)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


def over_http(endpoint: str) -> Tracer:
    """Return a tracer that sends spans to an OTLP collector.

    Args:
      endpoint: such as http://localhost:4318/v1/traces.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracer(OTLPSpanExporter(endpoint=endpoint))
