"""Exports spans through OpenTelemetry's SDK. Runs in the thread of `daskserve.telemetry.tracing.process`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from daskserve.common import settings
from daskserve.errors import BadRequestError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from daskserve.telemetry.tracing.span import RecordedSpan

CallImported: TypeAlias = Callable[[str, str], Any]

#: The name of an exporter in ``OTEL_TRACES_EXPORTER`` -> its entry point, by protocol for OTLP.
_OTLP: Mapping[str, str] = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
#: The size of the queue of the SDK's processor, unless a variable says otherwise.
QUEUE_SIZE = 2048


class CountingExporter:
    """An exporter of the SDK that counts what it was given, and what came of it."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        is_done = False
        try:
            result = self._exporter.export(spans)
            is_done = result.name == "SUCCESS"
            return result
        finally:
            if is_done:
                self.exported += len(spans)
            else:
                self.failed += len(spans)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


class Export:
    """The processors of spans, and how many spans they have exported."""

    def __init__(self, resource: Any, processors: Sequence[SpanProcessor], scope: Any) -> None:
        self._resource = resource
        self._scope = scope
        self.processors = processors
        self.counting: list[CountingExporter] = []
        self._given = self.dropped = 0
        self._queue_size = _number("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SIZE)

    @property
    def exported(self) -> int:
        """Spans that an exporter has delivered."""
        return sum(each.exported for each in self.counting)

    @property
    def failed(self) -> int:
        """Spans that an exporter could not deliver."""
        return sum(each.failed for each in self.counting)

    def put(self, span: RecordedSpan) -> None:
        """Pass a span on; drop it if the exporters' queues are full, because they drop without counting."""
        if any(self._given - self.dropped - each.taken >= self._queue_size for each in self.counting):
            self._given += 1
            self.dropped += 1
            return
        self._given += 1
        readable = readable_of(span, self._resource, self._scope)
        for processor in self.processors:
            processor.on_end(readable)

    def close(self, timeout_s: float) -> None:
        """Export what is left, and close the exporters."""
        for processor in self.processors:
            processor.force_flush(int(1000 * timeout_s))
            processor.shutdown()


def readable_of(span: RecordedSpan, resource: Any, scope: Any) -> ReadableSpan:
    """Return a recorded span as one of the SDK."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, Status, TraceFlags

    parent = span.parent
    return ReadableSpan(
        span.name,
        context=span.get_span_context(),
        parent=SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags))
        if parent.span_id
        else None,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(name, attributes, timestamp) for name, attributes, timestamp in span.events],
        links=list(span.links),
        kind=span.kind,
        status=Status(*span.status) if span.status[1] else Status(span.status[0]),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=scope,
    )


def open_export(described: Mapping[str, Any], path: str, call_imported: CallImported) -> Export:
    """Return the processors that a configuration names.

    Parameters
    ----------
    described : mapping
        What the spans say of the process.
    path : str
        The import path of a function that returns processors or exporters; empty: the standard ones.
    call_imported : callable
        ``call_imported(path, option)`` returns what the function of an import path returns.

    Raises
    ------
    ImportError
        OpenTelemetry's SDK or the exporter is not installed.
    BadRequestError
        The user's function failed, or returned something else.
    """
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ImportError(
            "tracing_config needs OpenTelemetry's SDK on the workers; pip install 'daskserve[tracing]'"
        )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from daskserve._version import __version__

    # The variables of OpenTelemetry win over our own names.
    own = {name: value for name, value in described.items() if value not in (None, "")}
    if settings.process_variables().get("OTEL_SERVICE_NAME"):
        own.pop("service.name", None)
    resource = Resource(own).merge(Resource.create({} if "service.name" not in own else own))
    made: Any = call_imported(path, "exporter_import_path") if path else _standard_exporters()
    found: list[SpanProcessor] = []
    export = Export(resource, found, InstrumentationScope("daskserve", __version__))
    each: Any
    for each in made if isinstance(made, (list, tuple)) else [made]:
        if hasattr(each, "on_end"):
            found.append(each)
        elif hasattr(each, "export"):
            counting = CountingExporter(each)
            export.counting.append(counting)
            found.append(BatchSpanProcessor(cast(Any, counting)))
        else:
            raise BadRequestError(
                f"exporter_import_path={path!r} must return span processors or exporters of OpenTelemetry, "
                f"got {each!r}"
            )
    return export


def _standard_exporters() -> list[SpanExporter]:
    """Return the exporters that OpenTelemetry's variables name; by default OTLP by HTTP."""
    variables = settings.process_variables()
    names = [each.strip() for each in variables.get("OTEL_TRACES_EXPORTER", "otlp").split(",")]
    return [_exporter(name, variables) for name in names if name not in ("", "none")]


def _exporter(name: str, variables: Mapping[str, str]) -> SpanExporter:
    if name == "otlp":
        protocol = variables.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or variables.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
        )
        name = _OTLP.get(protocol, protocol)
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    for point in entry_points(group="opentelemetry_traces_exporter", name=name):
        made: SpanExporter = point.load()()
        return made
    raise ImportError(
        f"There is no exporter of traces {name!r} on this worker. pip install 'daskserve[tracing]' has that "
        "of OTLP by HTTP; OTEL_TRACES_EXPORTER names another one"
    )


def _number(name: str, default: int) -> int:
    try:
        return int(settings.process_variables().get(name, default))
    except ValueError:
        return default
