"""Requests with a trace: which are sampled, and the span of a sampled one, by the conventions for HTTP.

See https://opentelemetry.io/docs/specs/semconv/http/http-spans/.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from daskserve.common.clock import stopwatch
from daskserve.common.types import Receive
from daskserve.proxies.asgi import Scope
from daskserve.proxies.ingress.metrics import NO_ROUTE, IngressMetrics
from daskserve.proxies.ingress.request import IngressRequest
from daskserve.telemetry.tracing.carrier import Carrier, parent_in, read_headers, traceparent

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.process import Tracing
    from daskserve.telemetry.tracing.span import RecordedSpan

#: More of a path, or of the name of a program, says nothing more.
MAX_TEXT = 512
#: The methods that the conventions know; others are one.
_METHODS = frozenset("GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH QUERY".split())

Serve = Callable[[IngressRequest, Scope, Receive], Awaitable[None]]


def serve_traced(
    serve: Serve,
    tracing: Tracing | None,
    metrics: IngressMetrics,
    request: IngressRequest,
    scope: Scope,
    receive: Receive,
) -> Awaitable[None]:
    """Serve a request that has a trace context, or may begin a trace."""
    carrier = read_headers(scope["headers"]) if request.has_trace_headers else None
    parent = parent_in(carrier or ())
    # The sender's decision counts: a trace with holes explains nothing.
    is_sampled = tracing is not None and (parent.is_sampled if parent.trace_id else tracing.draws())
    if tracing is None or not is_sampled:
        request.trace = carrier
        return serve(request, scope, receive)
    return _serve_sampled(serve, tracing, metrics, request, scope, receive, carrier or ("", "", ""))


async def _serve_sampled(
    serve: Serve,
    tracing: Tracing,
    metrics: IngressMetrics,
    request: IngressRequest,
    scope: Scope,
    receive: Receive,
    carrier: Carrier,
) -> None:
    from opentelemetry.trace import SpanKind  # takes long to import

    began = stopwatch()
    span = tracing.span(
        scope.get("method", "GET"),
        parent_in(carrier),
        _attributes(request, scope),
        SpanKind.SERVER,
        carrier[1],
    )
    request.trace = [traceparent(span.identity), carrier[1], carrier[2]]
    try:
        await serve(request, scope, receive)
    except BaseException as error:
        if not request.cause:
            request.cause = type(error).__qualname__
        raise
    finally:
        _end(span, request, scope)
        matched = request.response.matched_route
        metrics.note_trace(request.route, matched, stopwatch() - began, span.trace_id)


def _attributes(request: IngressRequest, scope: Scope) -> dict[str, Any]:
    found: dict[str, Any] = {
        "daskserve.step": "proxy_http_request",
        "url.path": scope["path"][:MAX_TEXT],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if (server := scope.get("server")) is not None:
        found["server.address"] = request.host.decode("latin-1").rpartition(":")[0] or server[0]
        found["server.port"] = server[1] or 0
    if (client := scope.get("client")) is not None:
        found["client.address"] = client[0]
    for name, value in scope["headers"]:
        if name == b"user-agent":
            found["user_agent.original"] = value.decode("latin-1")[:MAX_TEXT]
    return found


def _end(span: RecordedSpan, request: IngressRequest, scope: Scope) -> None:
    from daskserve.telemetry.tracing.span import note_failure

    method = scope.get("method", "GET")
    if method not in _METHODS:
        span.set_attribute("http.request.method_original", method[:MAX_TEXT])
        method = "_OTHER"
    span.set_attribute("http.request.method", method)
    span.set_attribute("daskserve.request_id", request.response.request_id.decode("latin-1"))
    name = method if method != "_OTHER" else "HTTP"
    if request.route is not NO_ROUTE:
        span.set_attribute("http.route", request.route.route)
        name = f"{name} {request.route.route}"
    span.update_name(name)
    status = request.response.status
    if status:
        span.set_attribute("http.response.status_code", status)
    if status >= 500 or request.cause or not status:
        kind = request.cause or (str(status) if status else "cancelled")
        span.set_attribute("error.type", kind)
        if status >= 500 or not status:
            note_failure(span, kind)
    span.end()
