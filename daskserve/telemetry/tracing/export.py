"""Exports spans through OpenTelemetry's SDK. Runs in the thread of `daskserve.telemetry.tracing.process`."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from daskserve.common import settings
from daskserve.common.clock import stopwatch
from daskserve.errors import BadRequestError
from daskserve.telemetry.error_log import ErrorLog
from daskserve.telemetry.tracing.carrier import SAMPLED

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

    from daskserve.telemetry.tracing.span import RecordedSpan

CallImported: TypeAlias = Callable[[str, str], Any]
#: Returns a function that sends an encoded body for an exporter: see
#: `daskserve.internals.otlp_exporter.post_of`.
PostOf: TypeAlias = Callable[[Any], Callable[[bytes], bool] | None]

#: The entry point of the OTLP exporter, by protocol.
_OTLP: Mapping[str, str] = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
#: The defaults of the SDK's processor; OpenTelemetry's environment variables override them.
QUEUE_SIZE, BATCH_SIZE, DELAY_MS = 2048, 512, 5000

logger = logging.getLogger("daskserve.tracing")


class Batches:
    """The queue of an exporter, and the thread that exports it in batches.

    It works like the SDK's own batch processor and reads the same environment variables. In addition, it
    counts dropped spans.

    Parameters
    ----------
    form : callable
        Converts a span to the form in which it waits; bytes take a fifth of a span's memory.
    send : callable
        Exports spans in this form, and returns whether the export succeeded.
    shutdown : callable
        Ends the exporter and its retries.
    """

    def __init__(
        self,
        form: Callable[[RecordedSpan], Any],
        send: Callable[[Sequence[Any]], bool],
        shutdown: Callable[[], object],
    ) -> None:
        self._form = form
        self._send = send
        self._shutdown = shutdown
        self._queue: deque[Any] = deque()
        self._max_queue = _number("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SIZE)
        self._max_batch = min(_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SIZE), self._max_queue)
        self._delay_s = _number("OTEL_BSP_SCHEDULE_DELAY", DELAY_MS) / 1000
        self._wakes = threading.Event()
        self._is_closing = False
        self._errors = ErrorLog(logger)
        self.exported = self.failed = self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="daskserve-trace-export", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[RecordedSpan]) -> None:
        """Add spans to the queue; drop those that do not fit."""
        room = max(0, self._max_queue - len(self._queue))
        for span in spans[:room]:
            try:
                self._queue.append(self._form(span))
            except Exception as error:
                self.failed += 1
                self._errors.log(error, "A span could not be encoded")
        self.dropped += max(0, len(spans) - room)
        if len(self._queue) >= self._max_batch:
            self._wakes.set()

    def _work(self) -> None:
        # The export runs in a trace that is not sampled. Otherwise, libraries that trace HTTP would record a
        # span for each export.
        nothing = NonRecordingSpan(SpanContext(1, 1, is_remote=False))
        context.attach(trace.set_span_in_context(nothing))
        while True:
            self._wakes.wait(self._delay_s)
            self._wakes.clear()
            is_last = self._is_closing
            while self._queue:
                self._export([self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))])
            if is_last:
                break

    def _export(self, spans: Sequence[Any]) -> None:
        is_done = False
        try:
            is_done = self._send(spans)
        except Exception as error:
            self._errors.log(error, "Spans could not be exported")
        if is_done:
            self.exported += len(spans)
        else:
            self.failed += len(spans)

    def close(self) -> None:
        """Begin to export the remaining spans."""
        self._is_closing = True
        self._wakes.set()

    def join(self, deadline: float) -> None:
        """Wait until all spans are exported, then end the exporter."""
        self._thread.join(max(0.0, deadline - stopwatch()))
        self._shutdown()


class Export:
    """The exporters and processors of spans, and how many spans they have exported."""

    def __init__(self, resource: Any, scope: Any, post_of: PostOf) -> None:
        self._resource = resource
        self._scope = scope
        self._post_of = post_of
        self.processors: list[SpanProcessor] = []
        self.batches: list[Batches] = []
        self._errors = ErrorLog(logger)
        self._dropped = 0

    @property
    def is_used(self) -> bool:
        """Whether there is an exporter or a processor."""
        return bool(self.batches or self.processors)

    @property
    def exported(self) -> int:
        """The number of spans that an exporter has delivered."""
        return sum(each.exported for each in self.batches)

    @property
    def failed(self) -> int:
        """The number of spans that an exporter could not deliver."""
        return sum(each.failed for each in self.batches)

    @property
    def dropped(self) -> int:
        """The number of spans that did not fit in an exporter's queue, or that a processor rejected."""
        return self._dropped + sum(each.dropped for each in self.batches)

    def readable_of(self, span: RecordedSpan) -> ReadableSpan:
        """Return a span as a span of the SDK."""
        return readable_of(span, self._resource, self._scope)

    def add(self, exporter: SpanExporter) -> None:
        """Add an exporter."""
        post = self._post_of(exporter)
        if post is None:
            readable = self.readable_of
            batches = Batches(
                lambda span: span,
                lambda spans: exporter.export([*map(readable, spans)]).name == "SUCCESS",
                exporter.shutdown,
            )
        else:
            from opentelemetry.sdk.trace import ReadableSpan

            from daskserve.telemetry.tracing.otlp import SpanEncoder

            shared: Any = {"resource": self._resource, "instrumentation_scope": self._scope}
            encoder = SpanEncoder(self.readable_of, ReadableSpan("", SpanContext(1, 1, False), **shared))
            send = post
            batches = Batches(encoder.span, lambda spans: send(encoder.body(spans)), exporter.shutdown)
        self.batches.append(batches)

    def put(self, spans: Sequence[RecordedSpan]) -> None:
        """Pass spans to all exporters and processors."""
        for batches in self.batches:
            batches.put(spans)
        for processor in self.processors:
            for span in spans:
                try:
                    processor.on_end(self.readable_of(span))
                except Exception as error:  # a user's processor may raise anything
                    self._dropped += 1
                    self._errors.log(error, "A span could not be processed")

    def close(self, timeout_s: float) -> None:
        """Export the remaining spans, and close the exporters."""
        deadline = stopwatch() + timeout_s
        for batches in self.batches:
            batches.close()
        closing: list[Callable[[], object]] = []
        for batches in self.batches:
            closing.append(partial(batches.join, deadline))
        for processor in self.processors:
            closing += [partial(processor.force_flush, int(1000 * timeout_s)), processor.shutdown]
        for close in closing:
            try:
                close()
            except Exception as error:  # close the others even if one fails
                self._errors.log(error, "The exporter of traces could not be closed")


def readable_of(span: RecordedSpan, resource: Any, scope: Any) -> ReadableSpan:
    """Return a recorded span as a span of the SDK."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, Status, TraceFlags

    return ReadableSpan(
        span.name,
        context=span.get_span_context(),
        parent=SpanContext(span.trace_id, span.parent_id, True, TraceFlags(SAMPLED))
        if span.parent_id
        else None,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(name, attributes, timestamp) for name, attributes, timestamp in span.events],
        links=list(span.links),
        kind=span.template.kind,
        status=Status(*span.status) if span.status[1] else Status(span.status[0]),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=scope,
    )


def open_export(
    described: Mapping[str, Any], path: str, call_imported: CallImported, post_of: PostOf
) -> Export:
    """Return the processors that a configuration names.

    Parameters
    ----------
    described : mapping
        The attributes of the process that all spans share.
    path : str
        The import path of a function that returns processors or exporters; if empty, the standard exporters
        are used.
    call_imported : callable
        ``call_imported(path, option)`` calls the function of an import path and returns its result.
    post_of : callable
        Returns a function that sends encoded bodies for an exporter; None for exporters that take spans.

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
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from daskserve._version import __version__

    # OpenTelemetry's environment variables override the defaults here.
    own = {name: value for name, value in described.items() if value not in (None, "")}
    if settings.process_variables().get("OTEL_SERVICE_NAME"):
        own.pop("service.name", None)
    resource = Resource(own).merge(Resource.create({} if "service.name" not in own else own))
    made: Any = call_imported(path, "exporter_import_path") if path else _standard_exporters()
    export = Export(resource, InstrumentationScope("daskserve", __version__), post_of)
    each: Any
    for each in made if isinstance(made, (list, tuple)) else [made]:
        if hasattr(each, "on_end"):
            export.processors.append(each)
        elif hasattr(each, "export"):
            export.add(each)
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
        f"The trace exporter {name!r} is not installed on this worker; pip install 'daskserve[tracing]' for "
        "OTLP over HTTP, or name another exporter in OTEL_TRACES_EXPORTER"
    )


def _number(name: str, default: int) -> int:
    try:
        return max(1, int(settings.process_variables().get(name, default)))
    except ValueError:
        return default
