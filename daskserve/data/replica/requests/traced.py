"""Requests with a trace context: each kind of request, with the spans of its replica and of user code.

Most requests have none, and pay for none of this: `daskserve.data.replica.local_code.LocalCode.handle` makes
these kinds only for a head with the key `TRACE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.trace import SpanKind

from daskserve.common.clock import stopwatch, wall_ns
from daskserve.common.types import Envelope, EnvelopeKind, split_deployment_tag
from daskserve.context import ReplicaContext, current_replica, current_request
from daskserve.data.replica.requests.calls import (
    CallRequest,
    PreparedCallRequest,
    PreparedStreamRequest,
    StreamRequest,
)
from daskserve.data.replica.requests.holding import HoldingRequest, holding
from daskserve.data.replica.requests.http import LocalHTTPRequest
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.replica.requests.serving import ServingCode
from daskserve.data.replica.requests.slots import found_at
from daskserve.data.replica.requests.states import FAILED, LATE, LEFT, WAITING, RequestEvent
from daskserve.data.replica.user_code.request_objects import request_id_of
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.tracing.carrier import NEW, TRACE, TRACEPARENT, Carrier, traceparent
from daskserve.telemetry.tracing.context import enter
from daskserve.telemetry.tracing.process import Tracing
from daskserve.telemetry.tracing.span import RecordedSpan, error_type, note_failure

#: How many of the requests that run are named.
MAX_NAMED = 8
#: A shorter wait for a slot gets no span.
SHORT_NS = 100_000

_ERRORS: Mapping[RequestEvent, str] = {LEFT: "cancelled", LATE: "timeout"}


class TracedRequest(LocalRequest):
    """What the kinds of requests with a trace context have in common."""

    is_traced = True

    carrier: Carrier
    #: The span of its way here, if no other process has made it.
    way: RecordedSpan | None = None
    #: What the replica did when the request arrived.
    found: dict[str, Any]

    def granted(self) -> None:
        super().granted()
        span = self.span
        if span is not None:
            record_wait(span, self.found)
            span.set_attribute("daskserve.replica.ongoing", self.slots.ongoing)

    def start_code(self, is_async: bool, function: Callable[..., Any], *args: Any) -> None:
        if self.span is None:
            self.context.run(enter, self.carrier)
            super().start_code(is_async, function, *args)
        else:
            run: Any = _run if is_async else _run_in_thread
            super().start_code(is_async, run, self, function, *args)

    def accept(self, value: Any) -> None:
        if type(value) is PackedError and self.span is not None and self.is_failure(value):
            note_failure(self.span, self.found.pop("error.type", "error"))
        super().accept(value)

    def answered(self) -> None:
        began = self._began
        super().answered()
        if self.span is not None:
            self.metrics.latency.note_trace(stopwatch() - began, self.span.trace_id)
            _end_spans(self)

    def _close(self, event: RequestEvent) -> None:
        was_waiting = self.state == WAITING
        super()._close(event)
        if self.span is not None:
            if was_waiting:
                record_wait(self.span, self.found)
            kind = _ERRORS.get(event) or ("refused" if was_waiting else self.found.get("error.type", event))
            if event != FAILED or was_waiting or self.span.status[0].name == "UNSET":
                note_failure(self.span, kind)
            _end_spans(self)


def _end_spans(request: TracedRequest) -> None:
    for span in (request.span, request.way):
        if span is not None:
            span.end()


async def _run(request: TracedRequest, function: Callable[..., Any], *args: Any) -> Any:
    span = _begin_code(request)
    try:
        return await function(*args)
    except BaseException as error:
        _note_error(request, span, error)
        raise
    finally:
        _end_code(request, span)


def _run_in_thread(request: TracedRequest, function: Callable[..., Any], *args: Any) -> Any:
    span = _begin_code(request)
    try:
        return function(*args)
    except BaseException as error:
        _note_error(request, span, error)
        raise
    finally:
        _end_code(request, span)


def _begin_code(request: TracedRequest) -> RecordedSpan:
    assert request.span is not None
    code = request.span.child(f"user code {request._method.name}", {"daskserve.step": "user_code"})
    enter(request.carrier, code)
    scope = getattr(request, "_scope", None)
    if scope is not None:
        # Frameworks read the header, and so does code that passes headers on.
        others = [each for each in scope["headers"] if each[0] != TRACEPARENT]
        scope["headers"] = [*others, (TRACEPARENT, traceparent(code.identity).encode())]
    return code


def _note_error(request: TracedRequest, span: RecordedSpan, error: BaseException) -> None:
    request.found["error.type"] = kind = error_type(error)
    span.record_exception(error)
    note_failure(span, kind)


def _end_code(request: TracedRequest, span: RecordedSpan) -> None:
    scope = getattr(request, "_scope", None)
    route = None if scope is None else scope.get("route")
    path = getattr(route, "path_format", None) or getattr(route, "path", None)
    if isinstance(path, str) and request.span is not None:
        request.span.set_attribute("http.route", path)
    span.end()


class TracedCall(TracedRequest, CallRequest):
    """A call with one result."""


class TracedStream(TracedRequest, StreamRequest):
    """A streaming call."""


class TracedPreparedCall(TracedRequest, PreparedCallRequest):
    """A call that waits for something before user code begins."""


class TracedPreparedStream(TracedRequest, PreparedStreamRequest):
    """A streaming call that waits for something before user code begins."""


class TracedHTTP(TracedRequest, LocalHTTPRequest):
    """An HTTP request or a WebSocket."""


_KINDS: Mapping[type[LocalRequest], type[TracedRequest]] = {
    CallRequest: TracedCall,
    StreamRequest: TracedStream,
    PreparedCallRequest: TracedPreparedCall,
    PreparedStreamRequest: TracedPreparedStream,
    LocalHTTPRequest: TracedHTTP,
}


def traced_request(
    kind: type[LocalRequest], envelope: Envelope, serving: ServingCode, tracing: Tracing | None
) -> LocalRequest:
    """Return a request of a kind, with its trace."""
    is_holding = issubclass(kind, HoldingRequest)
    traced = _KINDS[kind.__mro__[2] if is_holding else kind]
    made: type[TracedRequest] = holding(traced) if is_holding else traced
    request = made(envelope, serving.slots, serving.metrics)
    request.carrier = carrier = envelope.head[TRACE]
    request.found = {}
    request.span = None
    if tracing is not None:
        replica = serving.executor.context.get(current_replica)
        attributes = _attributes(replica, envelope)
        above = carrier
        if carrier and carrier[0] == NEW:  # its caller has no spans, so the time until here is not covered
            way = {**attributes, "daskserve.step": "route_to_replica"}
            request.way = tracing.under(carrier, f"route_to_replica {_called(replica, envelope)}", way)
            above = request.carrier = [traceparent(request.way.identity), "", ""] if request.way else carrier
        request.span = tracing.under(
            above, f"replica {_called(replica, envelope)}", attributes, SpanKind.SERVER
        )
        if request.span is not None:
            request.found = found_at(serving.slots, lambda: _running(serving))
    return request


def _called(replica: ReplicaContext | None, envelope: Envelope) -> str:
    deployment = "" if replica is None else replica.deployment
    if envelope.kind is EnvelopeKind.HTTP:
        return deployment
    return f"{deployment}.{envelope.head.get('method') or '__call__'}"


def _attributes(replica: ReplicaContext | None, envelope: Envelope) -> dict[str, Any]:
    found: dict[str, Any] = {
        "daskserve.step": "replica",
        "daskserve.request_id": request_id_of(envelope.head),
    }
    if replica is not None:
        found["daskserve.application"], found["daskserve.deployment"] = split_deployment_tag(
            replica.backend_tag
        )
        found["daskserve.replica"] = replica.replica_tag
        found["daskserve.version"] = replica.code_version
    if envelope.kind is EnvelopeKind.CALL:
        found["rpc.method"] = envelope.head.get("method") or "__call__"
    return found


def _running(serving: ServingCode) -> list[str]:
    """Return the ids and routes of requests that run, for what has to wait for them."""
    found = []
    for run in serving.executor.runs:
        request = run.context.get(current_request)
        if request is not None:
            found.append(f"{request.request_id} {request.route}".rstrip())
        if len(found) == MAX_NAMED:
            break
    return found


def record_wait(span: RecordedSpan, found: dict[str, Any]) -> None:
    """Record that a request has waited for a slot at its replica, unless that was short."""
    start = found.pop("start", 0)
    state = found.pop("state", None)
    if start and state is not None and wall_ns() - start > SHORT_NS:
        span.child("queue", state, start_ns=start).end()
