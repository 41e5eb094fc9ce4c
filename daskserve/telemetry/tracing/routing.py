"""The spans of a request's way to a replica: where it waited, for what, and which replicas refused it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from opentelemetry.trace import Span, SpanKind

from daskserve.telemetry.tracing.carrier import TRACE, Carrier, parent_in
from daskserve.telemetry.tracing.context import carrier_of, program_span
from daskserve.telemetry.tracing.process import KEY, Tracing, tracing_of
from daskserve.telemetry.tracing.span import RecordedSpan, error_type, exception_attributes, note_failure

T = TypeVar("T")


class Way:
    """One request on its way to a replica of a deployment, and back.

    The spans are those of this process: recorded, or, in a program that has set up OpenTelemetry itself, of
    its SDK.
    """

    def __init__(
        self, shared: Mapping[str, Any], span: Span, carrier: Carrier, facts: tuple[str, Any]
    ) -> None:
        self._shared = shared
        self._span = span
        #: The deployment and the method; for a recorded span also the replica and its worker.
        self._facts: tuple[Any, ...] = facts
        self._own = own = span if type(span) is RecordedSpan else None
        baggage = carrier[2] if len(carrier) > 2 else ""
        #: The trace context with which the request goes on.
        self.carrier: Carrier = (
            carrier_of(span, baggage) if own is None else [own.traceparent, own.tracestate, baggage]
        )
        self._attempts = 0

    async def wait(
        self, turn: Awaitable[T], *, waiting: int, ongoing: int, replicas: int, is_known: bool
    ) -> T:
        """Return what a wait for a free replica returns."""
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
        span = _begin(self._shared, self.carrier, "queue", attributes, SpanKind.INTERNAL)
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
        """Note that the request is sent to a replica."""
        self._attempts += 1
        if self._own is None:
            self._span.set_attributes(_place(replica, worker))
        else:
            self._facts = *self._facts[:2], replica, worker
        if is_queued:
            self._span.add_event("queued at a full replica", {"daskserve.replica": replica})

    def refused(self, error: BaseException, replica: str) -> None:
        """Note that a replica was full or lost, so that the request goes to another one."""
        self._span.add_event("retry", {**exception_attributes(error), "daskserve.replica": replica})
        self._span.set_attribute("daskserve.retries", self._attempts)

    def end(self, error: BaseException | None) -> None:
        """Note the end of the request."""
        if error is not None:
            note_failure(self._span, error_type(error))
        if self._own is not None:
            self._own.later = _complete, self._shared[KEY], self._facts
        self._span.end()


def _complete(span: RecordedSpan, tracing: Tracing, facts: tuple[Any, ...]) -> None:
    span.shared = tracing.shared.get(facts, _attributes)


def way_of(shared: Mapping[str, Any], head: Mapping[str, Any], deployment: str) -> Way | None:
    """Begin the way of a request whose head has a trace context; None if its trace is not sampled."""
    carrier: Carrier = head[TRACE]
    method = None if "type" in head else head.get("method")
    facts = deployment, (method or "__call__") if isinstance(method, str) else None
    name = f"route_to_replica {deployment}"
    span: Span | None
    tracing: Tracing | None = shared.get(KEY)
    if tracing is not None:
        span = tracing.under(carrier, name, kind=SpanKind.CLIENT)
    else:
        span = _begin(shared, carrier, name, _attributes(*facts), SpanKind.CLIENT)
    return None if span is None else Way(shared, span, carrier, facts)


def _attributes(deployment: str, method: str | None, replica: str = "", worker: str = "") -> dict[str, Any]:
    found = {"daskserve.step": "route_to_replica", "daskserve.deployment": deployment}
    if method is not None:
        found["rpc.method"] = method
    return {**found, **_place(replica, worker)} if replica else found


def _place(replica: str, worker: str) -> dict[str, Any]:
    return {"daskserve.replica": replica, "daskserve.worker": worker}


def _begin(
    shared: Mapping[str, Any], carrier: Carrier, name: str, attributes: dict[str, Any], kind: SpanKind
) -> Span | None:
    tracing = tracing_of(shared)
    if tracing is not None:
        return tracing.under(carrier, name, own=attributes, kind=kind)
    return program_span(carrier, name, attributes, kind) if parent_in(carrier).is_sampled else None
