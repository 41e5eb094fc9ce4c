"""Requests with a trace context, which make the spans of the replica and of user code.

`daskserve.data.replica.local_code.LocalCode.handle` creates such requests only if the head has the key
`TRACE`, so other requests have no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from opentelemetry.trace import SpanKind

from daskserve.common.clock import stopwatch, wall_ns
from daskserve.common.error_types import error_type
from daskserve.common.types import Envelope, EnvelopeKind, split_deployment_tag
from daskserve.context import current_replica, current_request
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.replica.requests.serving import ServingCode
from daskserve.data.replica.requests.slots import found_at
from daskserve.data.replica.requests.states import FAILED, LATE, LEFT, WAITING, RequestEvent
from daskserve.data.replica.user_code.request_objects import request_id_of
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.tracing.carrier import LENGTH, NEW, SAMPLED, TRACE, TRACEPARENT, Carrier
from daskserve.telemetry.tracing.context import enter
from daskserve.telemetry.tracing.process import Tracing
from daskserve.telemetry.tracing.span import RecordedSpan
from daskserve.telemetry.tracing.templates import ReplicaTemplates, SpanTemplate

#: Maximum number of running requests that a span names.
MAX_NAMED = 8
#: A shorter wait for a slot gets no span.
SHORT_NS = 100_000
#: A wait for a thread or an event loop that is longer than this gets an event.
LONG_S = 0.002

_ERRORS: Mapping[RequestEvent, str] = {LEFT: "cancelled", LATE: "timeout"}


class TracedRequest(LocalRequest):
    """The common part of the kinds of requests with a trace context."""

    is_traced = True

    carrier: Carrier
    #: The span of the routing, if this replica creates it.
    routing_span: RecordedSpan | None = None
    #: The attributes of the span of the request's wait for a slot; None if it need not wait.
    wait: dict[str, Any] | None = None
    #: The value of ``error.type`` for the request's user code.
    error_type = ""
    #: When the request's user code was started; the code may still wait for a thread or a loop.
    ready_at = 0.0
    #: The span of the request's user code between two steps.
    unfinished_code: RecordedSpan | None = None

    def granted(self) -> None:
        super().granted()
        span = self.span
        if span is not None:
            if self.wait is not None:
                _end_wait(self, span)
            assert span.own is not None
            span.own["daskserve.replica.ongoing"] = self.slots.ongoing

    def start_code(self, is_async: bool, function: Callable[..., Any], *args: Any) -> None:
        if self.span is None:
            self.context.run(enter, self.carrier)
            super().start_code(is_async, function, *args)
        else:
            run: Any = _run if is_async else _run_in_thread
            self.ready_at = stopwatch()
            super().start_code(is_async, run, self, function, *args)

    def accept(self, value: Any) -> None:
        if type(value) is PackedError and self.span is not None and self.is_failure(value):
            self.span.fail(self.error_type or "error")
        super().accept(value)

    def answered(self) -> None:
        began = self._began
        super().answered()
        span = self.span
        if span is not None:
            self.metrics.latency.note_trace(stopwatch() - began, span)
            span.end()
            if self.routing_span is not None:
                self.routing_span.end()

    def _close(self, event: RequestEvent) -> None:
        was_waiting = self.state == WAITING
        super()._close(event)
        if self.span is not None:
            if was_waiting:
                _end_wait(self, self.span)
            kind = _ERRORS.get(event) or ("refused" if was_waiting else self.error_type or event)
            if event != FAILED or was_waiting or self.span.status[0].name == "UNSET":
                self.span.fail(kind)
            _end_unfinished(self)
            self.span.end()
            if self.routing_span is not None:
                self.routing_span.end()

    def _free_if_ended(self) -> None:
        super()._free_if_ended()
        _end_unfinished(self)


def _end_unfinished(request: TracedRequest) -> None:
    """End the span of user code whose next step will not begin."""
    if request.unfinished_code is not None and request.run is None:
        request.unfinished_code.end()


def _end_wait(request: TracedRequest, span: RecordedSpan) -> None:
    """Record that a request has waited for a slot, unless the wait was short."""
    state, request.wait = request.wait, None
    if state is not None and wall_ns() - span.start_ns > SHORT_NS:
        wait = span.child("queue", state)
        wait.start_ns = span.start_ns
        wait.end()


async def _run(request: TracedRequest, function: Callable[..., Any], *args: Any) -> Any:
    span = _begin_code(request, "an event loop that other code blocks")
    try:
        value = await function(*args)
    except BaseException as error:
        _note_error(request, span, error)
        raise
    _end_code(request, span, value)
    return value


def _run_in_thread(request: TracedRequest, function: Callable[..., Any], *args: Any) -> Any:
    span = _begin_code(request, "a thread")
    try:
        value = function(*args)
    except BaseException as error:
        _note_error(request, span, error)
        raise
    _end_code(request, span, value)
    return value


def _begin_code(request: TracedRequest, awaited: str) -> RecordedSpan:
    """Begin or continue the span of user code; ``awaited`` names what the code waited for."""
    assert request.span is not None
    code = request.unfinished_code
    if code is not None:
        enter(request.carrier, code)
        return code
    templates = request.code.templates
    assert templates is not None
    code = request.span.child(templates.code.get(request._method.name, _code_template))
    waited_s = stopwatch() - request.ready_at
    if waited_s > LONG_S:
        facts = {"daskserve.wait.for": awaited, "daskserve.wait.seconds": round(waited_s, 6)}
        code.add_event("waited", {**facts, "daskserve.replica.ongoing": request.slots.ongoing})
    enter(request.carrier, code)
    scope = getattr(request, "_scope", None)
    if scope is not None:
        # Frameworks, and code that forwards headers, read this header.
        others = [each for each in scope["headers"] if each[0] != TRACEPARENT]
        others.append((TRACEPARENT, code.traceparent.encode()))
        scope["headers"] = others
    return code


def _note_error(request: TracedRequest, span: RecordedSpan, error: BaseException) -> None:
    request.error_type = kind = error_type(error)
    span.record_exception(error)
    span.fail(kind)
    _end_code(request, span)


def _end_code(request: TracedRequest, span: RecordedSpan, value: Any = None) -> None:
    """End the span of user code, unless it has further steps."""
    if type(value) is Unfinished:
        request.unfinished_code = span
        return
    scope = getattr(request, "_scope", None)
    if scope is not None and (route := scope.get("route")) is not None:
        path = getattr(route, "path_format", None) or getattr(route, "path", None)
        if isinstance(path, str) and request.span is not None:
            request.span.set_attribute("http.route", path)
    span.end()


@lru_cache(maxsize=64)
def _traced(kind: Any) -> type[TracedRequest]:
    """Return the class of requests of a kind with a trace context."""
    return type(f"Traced{kind.__name__}", (TracedRequest, kind), {})


def traced_request(
    kind: Any, envelope: Envelope, serving: ServingCode, tracing: Tracing | None
) -> LocalRequest:
    """Return a request of a kind, with its trace."""
    request = _traced(kind)(envelope, serving.slots, serving.metrics)
    head = envelope.head
    request.carrier = carrier = head[TRACE]
    if tracing is None:
        return request
    method = None
    if envelope.kind is EnvelopeKind.CALL:
        method = head.get("method") or "__call__"
    text = carrier[0] if carrier else ""
    if text == NEW:  # the caller creates no spans, so the span of the routing begins here
        request.routing_span = _begin_routing_span(serving, tracing, head, method)
        request.carrier = carrier = [request.routing_span.traceparent, "", ""]
        text = carrier[0]
    # The same as `parent_in`, in a third of the time.
    if len(text) == LENGTH and int(text[53:], 16) & SAMPLED:
        templates = serving.templates or _templates_of(serving)
        template = templates.requests.get(method, _request_template, templates)
        request.span = span = RecordedSpan(tracing.queue, template, text[:36], int(text[36:52], 16))
        span.own = {"daskserve.request_id": request_id_of(head)}
        if carrier[1]:
            span.tracestate = carrier[1]
        slots = serving.slots
        if slots.ongoing >= slots.concurrency or slots.waiting:
            request.wait = found_at(slots, lambda: _running(serving))
    return request


def _begin_routing_span(
    serving: ServingCode, tracing: Tracing, head: Mapping[str, Any], method: str | None
) -> RecordedSpan:
    """Begin the span of the routing, which is the first of its trace."""
    templates = serving.templates or _templates_of(serving)
    own = {"daskserve.request_id": request_id_of(head), **templates.values("route_to_replica", method)}
    routing_span = tracing.under(head[TRACE], templates.name("route_to_replica", method), own)
    assert routing_span is not None
    return routing_span


def _templates_of(serving: ServingCode) -> ReplicaTemplates:
    replica = serving.executor.context.get(current_replica)
    deployment, facts = "", {"daskserve.deployment": ""}
    if replica is not None:
        application, deployment = split_deployment_tag(replica.backend_tag)
        facts |= {
            "daskserve.deployment": deployment,
            "daskserve.application": application,
            "daskserve.replica": replica.replica_tag,
            "daskserve.version": replica.code_version,
        }
    serving.templates = found = ReplicaTemplates(deployment, facts)
    return found


def _request_template(method: str | None, templates: ReplicaTemplates) -> SpanTemplate:
    name, values = templates.name("replica", method), templates.values("replica", method)
    return SpanTemplate(name, SpanKind.SERVER, values)


def _code_template(method: str) -> SpanTemplate:
    return SpanTemplate(f"user code {method}", SpanKind.INTERNAL, {"daskserve.step": "user_code"})


def _running(serving: ServingCode) -> list[str]:
    """Return the ids and routes of running requests, for the span of a wait."""
    found = []
    for run in serving.executor.runs:
        request = run.context.get(current_request)
        if request is not None:
            found.append(f"{request.request_id} {request.route}".rstrip())
        if len(found) == MAX_NAMED:
            break
    return found
