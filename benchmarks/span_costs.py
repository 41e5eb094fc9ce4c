"""CPU time of the spans of a request: in the thread that exports them, and in OpenTelemetry's SDK alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, set_span_in_context

from daskserve.telemetry.tracing.export import readable_of
from daskserve.telemetry.tracing.otlp import SpanEncoder
from daskserve.telemetry.tracing.process import Tracing


def export_s(tracing: Tracing) -> float:
    """Return the CPU seconds of the exporter's thread for the waiting spans, per request of four spans."""
    resource, scope = Resource({"service.name": "i"}), InstrumentationScope("daskserve", "1")
    example = ReadableSpan(
        "", SpanContext(1, 1, is_remote=False), resource=resource, instrumentation_scope=scope
    )
    encoder = SpanEncoder(partial(readable_of, resource=resource, scope=scope), example)
    spans = list(tracing.queue.pending)
    tracing.queue.pending.clear()
    began = time.process_time()
    for span in spans:
        span.complete()
    encoder.body([*map(encoder.span, spans)])
    return (time.process_time() - began) / (len(spans) / 4)


class EncodingExporter(SpanExporter):
    """Encodes spans without sending them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def sdk_s(processor: BatchSpanProcessor, requests: int = 128) -> float:
    """Return the CPU seconds of all threads in which the SDK creates and exports four nested spans."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("bench")
    began = time.process_time()
    for number in range(requests):
        context, spans = None, []
        for name in ("GET /b", "route_to_replica", "replica", "user code"):
            attributes = {"daskserve.step": name, "url.path": "/b", "daskserve.request_id": f"{number:036d}"}
            spans.append(tracer.start_span(name, context, attributes=attributes))
            context = set_span_in_context(spans[-1])
        for span in reversed(spans):
            span.end()
    processor.force_flush()
    return (time.process_time() - began) / requests


def sdk_processor() -> BatchSpanProcessor:
    """Return a processor that exports only when ``force_flush`` is called."""
    return BatchSpanProcessor(EncodingExporter(), schedule_delay_millis=60_000)
