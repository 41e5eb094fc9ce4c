"""Spans as bytes of OTLP: the same as OpenTelemetry's own encoder writes."""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from daskserve.internals.otlp_exporter import post_of
from daskserve.telemetry.tracing.carrier import NO_PARENT
from daskserve.telemetry.tracing.export import readable_of
from daskserve.telemetry.tracing.otlp import SpanEncoder
from daskserve.telemetry.tracing.process import Tracing
from daskserve.telemetry.tracing.span import RecordedSpan

RESOURCE, SCOPE = Resource({"service.name": "shop", "process.pid": 7}), InstrumentationScope("daskserve", "1")


EXAMPLE = ReadableSpan("", SpanContext(1, 1, False), resource=RESOURCE, instrumentation_scope=SCOPE)


def readable(span: RecordedSpan) -> Any:
    return readable_of(span, RESOURCE, SCOPE)


def spans() -> list[RecordedSpan]:
    tracing = Tracing("shop", {"sampling_ratio": 1, "exporter_import_path": ""}, {}, lambda *_: None, post_of)
    root = tracing.span("GET /ä", NO_PARENT, {"url.path": "/" + "ö" * 300, "n": 1}, "v=1")
    numbers = {"n": 1.0, "is_ok": True, "is_not": False, "less": -3, "most": 2**63 - 1, "least": -(2**63)}
    child = root.child("", {**numbers, "zero": 0, "part": 0.25, "": "", "more": 300}, SpanKind.CLIENT)
    child.set_status(Status(StatusCode.ERROR, "KeyError"))
    odd = child.child("odd", {"running": ["a", "b"]})
    odd.add_event("retry", {"n": 1})
    odd.add_link(root.get_span_context())
    done = child.child("done", {"running": ["a"]}, SpanKind.SERVER)
    done.set_status(StatusCode.OK)
    for each in (odd, done, child, root):
        each.end()
    return list(tracing.pending)


def test_a_batch_is_what_opentelemetry_would_send() -> None:
    found = spans()
    encoder = SpanEncoder(readable, EXAMPLE)
    for _ in range(2):  # new, and kept
        ours = ExportTraceServiceRequest.FromString(encoder.body([*map(encoder.span, found)]))
        assert ours == encode_spans([readable(each) for each in found])


def test_what_is_odd_spoils_no_batch() -> None:
    tracing = Tracing("shop", {"sampling_ratio": 1, "exporter_import_path": ""}, {}, lambda *_: None, post_of)
    first = tracing.span("\ud800", NO_PARENT, {"n": 2**70, "text": "\ud800"})
    second = tracing.span("\ud800", NO_PARENT, {"n": object(), "m": 1})
    second.add_event("\ud800")
    encoder = SpanEncoder(readable, EXAMPLE)
    found = ExportTraceServiceRequest.FromString(encoder.body([encoder.span(first), encoder.span(second)]))
    one, other = found.resource_spans[0].scope_spans[0].spans
    assert [each.value.int_value or each.value.string_value for each in one.attributes] == [2**63 - 1, "?"]
    assert [(each.key, each.value.int_value) for each in other.attributes] == [("m", 1)]


def test_the_exporter_takes_a_body_in_the_installed_version() -> None:
    assert post_of(OTLPSpanExporter()) is not None  # else spans take the slower way
