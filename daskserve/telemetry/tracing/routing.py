"""The spans of routing: where and why a request waited for a replica, and which replicas rejected it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from opentelemetry.trace import Span, SpanKind

from daskserve.common.error_types import error_type
from daskserve.telemetry.tracing.carrier import LENGTH, NEW, SAMPLED, TRACE, Carrier, parent_in, trace_head
from daskserve.telemetry.tracing.context import carrier_of, program_span
from daskserve.telemetry.tracing.process import KEY, Tracing
from daskserve.telemetry.tracing.span import RecordedSpan, exception_attributes, note_failure
from daskserve.telemetry.tracing.templates import SpanTemplate, SpanTemplates

T = TypeVar("T")


class RoutingSpan:
    """The span of routing one request to a replica of a deployment, until its response ends."""

    #: The trace context that the request passes on.
    carrier: Carrier
    _attempts = 0

    @property
    @abstractmethod
    def _span(self) -> Span:
        """The span that is recorded."""

    async def wait(
        self, turn: Awaitable[T], *, waiting: int, ongoing: int, replicas: int, is_known: bool
    ) -> T:
        """Await a free replica within a span, and return the result."""
        attributes = {
            "daskserve.step": "queue",
            "daskserve.queue.place": "router",
            "daskserve.queue.waiting_before": waiting,
            "daskserve.queue.ongoing": ongoing,
            "daskserve.queue.replicas": replicas,
            "daskserve.queue.reason": "every replica is full"
            if replicas
            else "no replica runs"
            if is_known
            else "the replicas are not known yet",
        }
        span = _begin_wait(self._span, self.carrier, attributes)
        if span is None:
            return await turn
        try:
            return await turn
        except BaseException as error:
            note_failure(span, error_type(error))
            raise
        finally:
            span.end()

    def sent(self, replica: str, worker: str, *, is_queued: bool) -> None:
        """Record that the request is sent to a replica."""
        self._attempts += 1
        if is_queued:
            self._span.add_event("queued at a full replica", {"daskserve.replica": replica})

    def refused(self, error: BaseException, replica: str) -> None:
        """Record that a replica was full or lost, so that the request goes to another one."""
        self._span.add_event("retry", {**exception_attributes(error), "daskserve.replica": replica})
        self._span.set_attribute("daskserve.retries", self._attempts)

    def finish(self, error: BaseException | None) -> None:
        """Record the end of the request."""
        if error is not None:
            note_failure(self._span, error_type(error))
        self._span.end()


class RecordedRoutingSpan(RecordedSpan, RoutingSpan):
    """The span in a process of the instance."""

    #: The deployment and the method.
    _called: tuple[str, str | None]
    #: The replica and its worker, once they are known.
    _place: tuple[str, str] | None = None
    #: The templates of all routing spans of the instance.
    _templates: SpanTemplates

    @property
    def _span(self) -> RecordedSpan:
        return self

    def sent(self, replica: str, worker: str, *, is_queued: bool) -> None:
        if is_queued or self._attempts:
            super().sent(replica, worker, is_queued=is_queued)
        else:
            self._attempts = 1
        self._place = replica, worker

    def finish(self, error: BaseException | None) -> None:
        if error is not None:
            note_failure(self, error_type(error))
        self.end()

    def complete(self) -> None:
        self.template = self._templates.get((self._called, self._place), _template)


class ProgramRoutingSpan(RoutingSpan):
    """The span in a program that has set up OpenTelemetry itself; it belongs to the program's SDK."""

    _span: Span = None  # type: ignore[assignment]

    def __init__(self, span: Span, carrier: Carrier) -> None:
        self._span = span
        self.carrier = carrier_of(span, carrier[2] if len(carrier) > 2 else "")

    def sent(self, replica: str, worker: str, *, is_queued: bool) -> None:
        super().sent(replica, worker, is_queued=is_queued)
        self._span.set_attributes(_place_of(replica, worker))


def _begin_wait(routing_span: Span, carrier: Carrier, attributes: dict[str, Any]) -> Span | None:
    if isinstance(routing_span, RecordedSpan):
        return routing_span.child("queue", attributes)
    return program_span(carrier, "queue", attributes, SpanKind.INTERNAL)


def start_routing_span(
    shared: Mapping[str, Any], head: Mapping[str, Any], deployment: str
) -> RoutingSpan | None:
    """Start the span of a request whose head has a trace context; None if its trace is not sampled."""
    carrier: Carrier = head[TRACE]
    method = None if "type" in head else head.get("method")
    called = deployment, (method or "__call__") if isinstance(method, str) else None
    tracing: Tracing | None = shared.get(KEY)
    if tracing is None:
        span = None
        if parent_in(carrier).is_sampled:
            template = _template((called, None))
            span = program_span(carrier, template.name, template.values, template.kind)
        return None if span is None else ProgramRoutingSpan(span, carrier)
    text = carrier[0] if carrier else ""
    if len(text) == LENGTH:
        # The same as `parent_in`, in a third of the time.
        if not int(text[53:], 16) & SAMPLED:
            return None
        routing_span = RecordedRoutingSpan(tracing.queue, tracing.unrouted, text[:36], int(text[36:52], 16))
        if carrier[1]:
            routing_span.tracestate = carrier[1]
    elif text == NEW:
        routing_span = RecordedRoutingSpan(
            tracing.queue, tracing.unrouted, trace_head(tracing.queue.bits(128) | 1), 0
        )
        routing_span.start_ns = int(carrier[3])
    else:
        return None
    routing_span._called = called
    routing_span._templates = tracing.templates
    # The same as `traceparent`, inlined for speed.
    routing_span.carrier = [f"{routing_span.trace}{routing_span.span_id:016x}-01", carrier[1], carrier[2]]
    return routing_span


def _template(key: tuple[tuple[str, str | None], tuple[str, str] | None]) -> SpanTemplate:
    (deployment, method), place = key
    found: dict[str, Any] = {"daskserve.step": "route_to_replica", "daskserve.deployment": deployment}
    if method is not None:
        found["rpc.method"] = method
    if place is not None:
        found |= _place_of(*place)
    return SpanTemplate(f"route_to_replica {deployment}", SpanKind.CLIENT, found)


def _place_of(replica: str, worker: str) -> dict[str, Any]:
    return {"daskserve.replica": replica, "daskserve.worker": worker}
