"""Requests with a trace context: each kind of request, with the spans of its replica and of user code.

Most requests have none, and pay for none of this: `daskserve.data.replica.local_code.LocalCode.handle` makes
these kinds only for a head with the key `TRACE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskserve.common.clock import stopwatch, wall_ns
from daskserve.common.types import Envelope, EnvelopeKind, split_deployment_tag
from daskserve.context import current_replica, current_request
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
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.tracing.carrier import NEW, TRACE, TRACEPARENT, Carrier
from daskserve.telemetry.tracing.context import enter
from daskserve.telemetry.tracing.process import Tracing
from daskserve.telemetry.tracing.shared import USER_CODE
from daskserve.telemetry.tracing.span import RecordedSpan, error_type

#: How many of the requests that run are named.
MAX_NAMED = 8
#: A shorter wait for a slot gets no span.
SHORT_NS = 100_000
#: A longer wait for a thread or an event loop gets an event.
LONG_S = 0.002

_ERRORS: Mapping[RequestEvent, str] = {LEFT: "cancelled", LATE: "timeout"}


class TracedRequest(LocalRequest):
    """What the kinds of requests with a trace context have in common."""

    is_traced = True

    carrier: Carrier
    #: The span of its way here, if no other process has made it.
    way: RecordedSpan | None = None
    #: For what it waits, unless there was a slot when it arrived.
    wait: dict[str, Any] | None = None
    #: The value of ``error.type`` of its user code.
    error_type = ""
    #: When its user code could begin.
    ready_at = 0.0
    #: The span of its user code, while that has further steps.
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
            self.metrics.latency.note_trace(stopwatch() - began, span.ids)
            span.end()
            if self.way is not None:
                self.way.end()

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
            if self.way is not None:
                self.way.end()

    def _free_if_ended(self) -> None:
        super()._free_if_ended()
        _end_unfinished(self)


def _end_unfinished(request: TracedRequest) -> None:
    """End the span of user code whose next step will not begin."""
    if request.unfinished_code is not None and request.run is None:
        request.unfinished_code.end()


def _end_wait(request: TracedRequest, span: RecordedSpan) -> None:
    """Record that a request has waited for a slot, unless that was short."""
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
    """Begin the span of user code, or go on with it in the next step; ``awaited`` is what it waited for."""
    assert request.span is not None
    code = request.unfinished_code
    if code is not None:
        enter(request.carrier, code)
        return code
    code = request.span.child(f"user code {request._method.name}", USER_CODE)
    waited_s = stopwatch() - request.ready_at
    if waited_s > LONG_S:
        facts = {"daskserve.wait.for": awaited, "daskserve.wait.seconds": round(waited_s, 6)}
        code.add_event("waited", {**facts, "daskserve.replica.ongoing": request.slots.ongoing})
    enter(request.carrier, code)
    scope = getattr(request, "_scope", None)
    if scope is not None:
        # Frameworks read the header, and so does code that passes headers on.
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
    head = envelope.head
    request.carrier = carrier = head[TRACE]
    request.span = None
    if tracing is None:
        return request
    names = serving.names or _names(serving)
    own = {"daskserve.request_id": request_id_of(head)}
    called, method = names[1], None
    if envelope.kind is EnvelopeKind.CALL:
        method = head.get("method") or "__call__"
        called = f"{called}.{method}"
    if carrier and carrier[0] == NEW:  # its caller has no spans, so the time until here is not covered
        way = {**own, **_shared(*names, method), "daskserve.step": "route_to_replica"}
        request.way = tracing.under(carrier, f"route_to_replica {called}", own=way)
        if request.way is not None:
            request.carrier = carrier = [request.way.traceparent, "", ""]
    request.span = span = tracing.under(carrier, f"replica {called}", own, tracing.server_kind)
    if span is not None:
        span.later = _complete, tracing, (*names, method)
        slots = serving.slots
        if slots.ongoing >= slots.concurrency or slots.waiting:
            request.wait = found_at(slots, lambda: _running(serving))
    return request


def _names(serving: ServingCode) -> tuple[str, str, str, str]:
    """Return the application, deployment, replica and version of all requests of a replica."""
    replica = serving.executor.context.get(current_replica)
    if replica is None:
        return ("", "", "", "")
    deployment = split_deployment_tag(replica.backend_tag)
    serving.names = found = (*deployment, replica.replica_tag, replica.code_version)
    return found


def _complete(span: RecordedSpan, tracing: Tracing, key: tuple[Any, ...]) -> None:
    span.shared = tracing.shared.get(key, _shared)


def _shared(
    application: str, deployment: str, replica: str, version: str, method: str | None
) -> dict[str, Any]:
    """Return the attributes that the requests to a method of a replica share."""
    found = {"daskserve.step": "replica", "daskserve.deployment": deployment}
    if replica:
        found |= {
            "daskserve.application": application,
            "daskserve.replica": replica,
            "daskserve.version": version,
        }
    if method is not None:
        found["rpc.method"] = method
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
