"""Spans as plain records, which are converted to spans of the SDK for export.

Creating a span of OpenTelemetry's SDK takes ten times as long, which would delay requests.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from daskserve.common.clock import wall_ns
from daskserve.common.error_types import error_type
from daskserve.telemetry.tracing.carrier import SAMPLED
from daskserve.telemetry.tracing.templates import SpanTemplate

#: Maximum number of ended spans that wait for the thread, as in the SDK's own queue.
MAX_PENDING = 2048
#: How many spans are exported at once by the thread that ends the last of them.
BATCH = 128
#: The SDK's default limits.
MAX_ATTRIBUTES = 128
MAX_EVENTS = 128
#: The values of attributes, and the items of their lists.
PLAIN = (str, bool, int, float)

logger = logging.getLogger("daskserve.tracing")


class SpanQueue:
    """The ended spans of an instance, until they are exported.

    Parameters
    ----------
    bits : callable
        Returns a random number with the given number of bits.
    wake : callable
        Requests an export of the ended spans soon.
    export_some : callable
        Exports ended spans in the calling thread, if that is quick.
    """

    def __init__(
        self, bits: Callable[[int], int], wake: Callable[[], object], export_some: Callable[[], object]
    ) -> None:
        self.bits = bits
        self.wake = wake
        self.export_some = export_some
        #: At most `MAX_PENDING`.
        self.pending: deque[RecordedSpan] = deque()
        self.is_closed = False
        #: Whether the thread that exports was woken.
        self.is_awake = False
        self.dropped = 0


class RecordedSpan(Span):
    """A span of a sampled trace; when it ends, it is added to ``queue.pending`` once.

    Any thread may use it, like every span of OpenTelemetry.
    """

    # Few spans change these.
    end_ns = 0
    tracestate = ""
    status: tuple[StatusCode, str] = (StatusCode.UNSET, "")
    #: ``(name, attributes, time)`` of each event.
    events: Sequence[tuple[str, Mapping[str, Any], int]] = ()
    links: Sequence[Link] = ()
    #: Attributes that the span does not share with its template.
    own: dict[str, Any] | None = None
    #: A function, called with the span and these arguments, that sets attributes which are costly to compute.
    #: It runs when the span is exported or read, so that no request waits for it.
    later: tuple[Any, ...] | None = None
    _context: SpanContext | None = None

    def __init__(self, queue: SpanQueue, template: SpanTemplate, trace: str, parent_id: int) -> None:
        self.queue = queue
        self.template = template
        #: The beginning of a ``traceparent``, which all spans of the trace share.
        self.trace = trace
        #: 0 for the first span of a trace.
        self.parent_id = parent_id
        self.span_id = queue.bits(64) | 1
        self.start_ns = wall_ns()

    @property
    def name(self) -> str:
        """The span's name."""
        return self.template.name

    @property
    def trace_id(self) -> int:
        """The trace id as a number."""
        return int(self.trace[3:35], 16)

    @property
    def ids(self) -> str:
        """The ids of the trace and the span, as exemplars of metrics show them."""
        return f"{self.trace[3:]}{self.span_id:016x}"

    @property
    def attributes(self) -> Mapping[str, Any]:
        """All attributes, those of the template included."""
        self.complete()
        return {**self.template.values, **(self.own or {})}

    @property
    def traceparent(self) -> str:
        """The ``traceparent`` that makes the span the parent of others."""
        return f"{self.trace}{self.span_id:016x}-01"

    def child(
        self,
        name: str | SpanTemplate,
        attributes: dict[str, Any] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> RecordedSpan:
        """Begin a child of this span, by a template or a name, with further attributes."""
        template = SpanTemplate(name, kind) if isinstance(name, str) else name
        found = RecordedSpan(self.queue, template, self.trace, self.span_id)
        if attributes is not None:
            found.own = attributes
        if self.tracestate:
            found.tracestate = self.tracestate
        return found

    def complete(self) -> None:
        """Set the attributes that `later` computes, once."""
        later, self.later = self.later, None
        if later is not None:
            later[0](self, *later[1:])

    def fail(self, kind: str) -> None:
        """Record that the work of the span has failed; ``kind`` is the value of ``error.type``."""
        self.set_attribute("error.type", kind)
        self.set_status(StatusCode.ERROR, kind)

    # ---- OpenTelemetry's interface

    def get_span_context(self) -> SpanContext:
        found = self._context
        if found is None:
            state = TraceState.from_header([self.tracestate]) if self.tracestate else None
            found = self._context = SpanContext(
                self.trace_id,
                self.span_id,
                is_remote=False,
                trace_flags=TraceFlags(SAMPLED),
                trace_state=state,
            )
        return found

    def is_recording(self) -> bool:
        return not self.end_ns

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if self.end_ns:
            return
        cleaned, known, template = _cleaned(attributes), self.own, self.template
        if not template.values.keys().isdisjoint(cleaned):
            known = dict(self.attributes)
            self.template = template = SpanTemplate(template.name, template.kind)
        if known is None:
            known = {}
        most = MAX_ATTRIBUTES - len(template.values)
        for key, value in cleaned.items():
            if key in known or len(known) < most:
                known[key] = value
        self.own = known

    def add_event(
        self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None
    ) -> None:
        if not self.end_ns and len(self.events) < MAX_EVENTS:
            event = name, _cleaned(attributes or {}), timestamp or wall_ns()
            self.events = [*self.events, event]

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        if not self.end_ns and len(self.links) < MAX_EVENTS and context.is_valid:
            self.links = [*self.links, Link(context, attributes)]

    def update_name(self, name: str) -> None:
        if not self.end_ns:
            template = self.template
            self.template = SpanTemplate(str(name), template.kind, template.values)

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
            now, began = end_time or wall_ns(), self.start_ns
            self.end_ns = now if now > began else began  # the clock may have been set back
            queue = self.queue
            pending = queue.pending
            if queue.is_closed or len(pending) >= MAX_PENDING:
                queue.dropped += 1
                return
            pending.append(self)
            if len(pending) >= BATCH:
                queue.export_some()
            if not queue.is_awake:
                queue.wake()

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


def _cleaned(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of attributes of user code, without the values that no exporter accepts."""
    found: dict[str, Any] = {}
    for key, value in itertools.islice(attributes.items(), MAX_ATTRIBUTES):
        if isinstance(value, PLAIN):
            found[str(key)] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(each, PLAIN) for each in value):
            found[str(key)] = tuple(value)
        else:
            logger.warning(
                "Attribute %r of a span has a value of type %s, which cannot be exported", key, type(value)
            )
    return found


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
