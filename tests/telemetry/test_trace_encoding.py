"""Spans as bytes of OTLP: the same bytes as from OpenTelemetry's own encoder."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from tables import each_case

from daskserve.errors import BadRequestError
from daskserve.internals.otlp_exporter import post_of
from daskserve.telemetry.tracing.carrier import NO_PARENT
from daskserve.telemetry.tracing.export import Batches, Export, open_export, readable_of
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
    return list(tracing.queue.pending)


def test_a_batch_is_what_opentelemetry_would_send() -> None:
    found = spans()
    encoder = SpanEncoder(readable, EXAMPLE)
    for _ in range(2):  # new, and kept
        ours = ExportTraceServiceRequest.FromString(encoder.body([*map(encoder.span, found)]))
        assert ours == encode_spans([readable(each) for each in found])


def test_unencodable_values_do_not_spoil_a_batch() -> None:
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


# ---- who exports them


def test_spans_that_cannot_be_exported_are_counted_and_cost_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "no number")
    sent: list[Sequence[Any]] = []
    may_send = threading.Event()

    def form(span: Any) -> Any:
        if span == "odd":
            raise ValueError("no text")
        return span

    def send(spans: Sequence[Any]) -> bool:
        may_send.wait(10)
        sent.append(spans)
        if "raises" in spans:
            raise OSError("away")
        return "refused" not in spans

    closed: list[bool] = []
    batches = Batches(form, send, lambda: closed.append(True))
    batches.put(["odd", "a"])
    batches.put(["b", "raises", "refused", "dropped", "dropped, too"])
    may_send.set()
    batches.close()
    batches.join(time.monotonic() + 10)
    assert sent == [["a", "b"], ["raises", "refused"]]
    assert (batches.exported, batches.failed, batches.dropped) == (2, 3, 2)
    assert closed == [True]
    assert "A span could not be encoded" in caplog.text
    assert "Spans could not be exported" in caplog.text


class Processor(SimpleSpanProcessor):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: list[Any] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.name == "odd":
            raise ValueError("not this one")
        self.names.append(span.name)

    def force_flush(self, timeout_millis: int = 0) -> bool:
        self.calls.append(timeout_millis)
        raise OSError("away")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_processor_of_the_user_gets_each_span_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    processor = Processor()
    export = open_export({"service.name": "shop"}, "m:f", lambda path, option: processor, post_of)
    assert (export.is_used, export.processors, export.batches) == (True, [processor], [])
    export.put(spans())
    assert (processor.names, export.dropped) == (["done", "", "GET /ä"], 1)
    export.close(2.5)
    assert processor.calls == [2500, "shutdown"]
    assert "A span could not be processed" in caplog.text
    assert "could not be closed" in caplog.text


def test_exporters_are_those_that_the_variables_or_the_function_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: str = "", made: Any = None) -> Export:
        found = open_export({"service.name": "shop"}, path, lambda *_: made, post_of)
        found.close(5.0)
        return found

    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    for name, count in (("none", 0), ("", 0), ("console", 1), ("console, none ,console", 2), ("otlp", 1)):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", name)
        assert len(opened().batches) == count, name
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    assert len(opened().batches) == 1, "by default OTLP"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier/pigeon")
    with pytest.raises(
        ImportError, match="The trace exporter 'carrier/pigeon' is not installed on this worker"
    ):
        opened()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert len(opened().batches) == 1, "that of traces wins"
    several = opened("m:f", [ConsoleSpanExporter(), Processor()])
    assert (len(several.batches), len(several.processors)) == (1, 1)
    with pytest.raises(
        BadRequestError, match=r"exporter_import_path='m:f' must return span processors .* got 5"
    ):
        opened("m:f", [5])


@each_case(
    ("variable", "described", "name"),
    [
        (None, "shop", "shop"),
        ("of the variable", "shop", "of the variable"),
        (None, "", "unknown_service:python"),
    ],
)
def test_the_name_of_the_service_is_the_variable_s_before_ours(
    variable: str | None, described: str, name: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OTEL_SERVICE_NAME", raising=False)
        if variable is not None:
            patch.setenv("OTEL_SERVICE_NAME", variable)
        export = open_export(
            {"service.name": described, "a": "b", "none": None}, "m:f", lambda *_: [], post_of
        )
        assert not export.is_used
        found = export.readable_of(spans()[0]).resource.attributes
        assert (found["service.name"], found["a"], "none" in found) == (name, "b", False)
