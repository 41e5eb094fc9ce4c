"""Spans that cost little: plain records, which become spans of the SDK where they are exported.

A span of OpenTelemetry's SDK takes ten times as long to make, which a request would wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from daskserve.common.clock import wall_ns
from daskserve.telemetry.tracing.carrier import SAMPLED, Parent

#: The SDK's own default limits.
MAX_ATTRIBUTES = 128
MAX_EVENTS = 128


class SpanMaker(Protocol):
    """Makes and keeps the spans of an instance; see `daskserve.telemetry.tracing.process.Tracing`."""

    is_closed: bool

    def span(
        self,
        name: str,
        parent: Parent,
        attributes: dict[str, Any],
        kind: SpanKind = SpanKind.INTERNAL,
        tracestate: str = "",
        start_ns: int = 0,
    ) -> RecordedSpan: ...

    def keep(self, span: RecordedSpan) -> None: ...


class RecordedSpan(Span):
    """A span of a sampled trace; ``tracing.keep`` gets it when it ends, once.

    Any thread may use it, as any span of OpenTelemetry.
    """

    def __init__(
        self,
        tracing: SpanMaker,
        name: str,
        parent: Parent,
        span_id: int,
        attributes: dict[str, Any],
        kind: SpanKind = SpanKind.INTERNAL,
        tracestate: str = "",
        start_ns: int = 0,
    ) -> None:
        self.tracing = tracing
        self.name = name
        self.parent = parent
        self.trace_id = parent.trace_id
        self.span_id = span_id
        self.attributes = attributes
        self.kind = kind
        self.tracestate = tracestate
        self.start_ns = start_ns or wall_ns()
        self.end_ns = 0
        #: ``(name, attributes, time)`` of each event.
        self.events: list[tuple[str, Mapping[str, Any], int]] = []
        self.links: list[Link] = []
        self.status = StatusCode.UNSET, ""
        self._context: SpanContext | None = None

    @property
    def identity(self) -> Parent:
        """The span as the parent of others."""
        return Parent(self.trace_id, self.span_id, SAMPLED)

    def child(
        self,
        name: str,
        attributes: dict[str, Any],
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int = 0,
    ) -> RecordedSpan:
        """Begin a span under this one."""
        return self.tracing.span(name, self.identity, attributes, kind, self.tracestate, start_ns)

    def fail(self, kind: str) -> None:
        """Note that the work of the span has failed; ``kind`` is the value of ``error.type``."""
        self.set_attribute("error.type", kind)
        self.set_status(StatusCode.ERROR, kind)

    # ---- OpenTelemetry's interface

    def get_span_context(self) -> SpanContext:
        found = self._context
        if found is None:
            state = TraceState.from_header([self.tracestate]) if self.tracestate else None
            found = self._context = SpanContext(
                self.parent.trace_id,
                self.span_id,
                is_remote=False,
                trace_flags=TraceFlags(SAMPLED),
                trace_state=state,
            )
        return found

    def is_recording(self) -> bool:
        return not self.end_ns

    def set_attribute(self, key: str, value: Any) -> None:
        known = self.attributes
        if not self.end_ns and (key in known or len(known) < MAX_ATTRIBUTES):
            known[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(
        self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None
    ) -> None:
        if not self.end_ns and len(self.events) < MAX_EVENTS:
            self.events.append((name, dict(attributes or {}), timestamp or wall_ns()))

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        if not self.end_ns and len(self.links) < MAX_EVENTS and context.is_valid:
            self.links.append(Link(context, attributes))

    def update_name(self, name: str) -> None:
        if not self.end_ns:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self.end_ns or self.status[0] is StatusCode.OK:
            return
        if isinstance(status, Status):
            description = status.description
        code = status.status_code if isinstance(status, Status) else status
        if code is not StatusCode.UNSET:
            self.status = code, (description or "") if code is StatusCode.ERROR else ""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        self.add_event("exception", {**exception_attributes(exception), **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        if not self.end_ns:
            self.end_ns = max(end_time or wall_ns(), self.start_ns)
            self.tracing.keep(self)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if exc_val is not None:
            self.record_exception(exc_val)
            note_failure(self, error_type(exc_val))
        self.end()


def error_type(error: BaseException) -> str:
    """Return the value of ``error.type`` for an error."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def exception_attributes(error: BaseException) -> dict[str, str]:
    """Return the attributes of an event about an error. Any class may have a ``__str__`` that fails."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return {"exception.type": error_type(error), "exception.message": text[:1024]}


def note_failure(span: Span, kind: str) -> None:
    """Set the status of a span whose work has failed; ``kind`` is the value of ``error.type``."""
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, kind)
