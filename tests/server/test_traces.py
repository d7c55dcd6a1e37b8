"""Spans of OpenTelemetry: one a request, under the parent that the client names."""

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jspec.server import traces
from tests.server import live

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("headers", [{}, {"traceparent": PARENT}, {"traceparent": "nonsense"}])
def test_a_request_is_a_span(llm, headers):
    spans = InMemorySpanExporter()
    tracer = traces.Tracer(spans)
    with live.running(llm, record=tracer.record) as server:
        body = {"prompt": "the quick", "max_tokens": 8, "ignore_eos": True, "request_id": "mine"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()
    tracer.close()
    (span,) = spans.get_finished_spans()
    assert span.name == "llm_request" and span.end_time > span.start_time
    assert span.attributes["gen_ai.request.id"] == answer["id"] == "cmpl-mine"
    assert span.attributes["gen_ai.usage.completion_tokens"] == 8
    seconds = (span.end_time - span.start_time) / 1e9
    assert 0 < span.attributes["gen_ai.latency.e2e"] <= seconds
    if headers.get("traceparent") == PARENT:
        assert f"{span.parent.trace_id:032x}" == PARENT.split("-")[1]
    else:
        assert span.parent is None
