"""The spans of sampled requests, by OpenTelemetry's semantic conventions for HTTP.

See https://opentelemetry.io/docs/specs/semconv/http/http-spans/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskserve.proxies.asgi import Scope
from daskserve.proxies.ingress.forwarded import without_port
from daskserve.proxies.ingress.metrics import NO_ROUTE
from daskserve.proxies.ingress.request import IngressRequest
from daskserve.telemetry.tracing.carrier import NO_PARENT, parent_in, read_headers
from daskserve.telemetry.tracing.templates import SpanTemplate

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.process import Tracing
    from daskserve.telemetry.tracing.span import RecordedSpan

#: Maximum length of a path, a host or a user agent in an attribute.
MAX_TEXT = 512
#: The methods of the conventions; all others are recorded as `OTHER`.
_METHODS = frozenset("GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH QUERY".split())
OTHER = "_OTHER"


def begin_trace(tracing: Tracing | None, request: IngressRequest, scope: Scope) -> None:
    """Read the trace context of a request, and start its span if it is sampled."""
    carrier, parent = None, NO_PARENT
    if request.has_trace_headers:
        request.trace = carrier = read_headers(scope["headers"])
        parent = parent_in(carrier or ())
    # If the request has a sender's trace, the sender decides, because a trace with missing spans explains
    # nothing.
    if tracing is None or not (parent.is_sampled if parent.trace_id else tracing.draws()):
        return
    state, baggage = carrier[1:] if carrier else ("", "")
    trace = f"00-{parent.trace_id or tracing.queue.bits(128) | 1:032x}-"  # as `trace_head`
    request.span = span = tracing.begin(tracing.unrouted, trace, parent.span_id)
    if state:
        span.tracestate = state
    # Set now, because the path in the scope may change until the request ends.
    span.own = {"url.path": scope["path"]}
    request.trace = [f"{trace}{span.span_id:016x}-01", state, baggage]  # as `span.traceparent`


def _template(key: tuple[Any, ...], kind: Any) -> SpanTemplate:
    name: str
    method, route, status, scheme, version, server, host, client, agent = key
    name = "HTTP" if method == OTHER else method
    found: dict[str, Any] = {
        "daskserve.step": "proxy_http_request",
        "url.scheme": scheme,
        "network.protocol.version": version,
        "http.request.method": method,
    }
    if route is not None:
        found["http.route"] = route
    if server is not None:
        found["server.address"] = without_port(host.decode("latin-1")) or server[0]
        found["server.port"] = server[1] or 0
    if client is not None:
        found["client.address"] = client
    if agent:
        found["user_agent.original"] = agent.decode("latin-1")
    if status:
        found["http.response.status_code"] = status
    return SpanTemplate(name if route is None else f"{name} {route}", kind, found)


def end_trace(tracing: Tracing, span: RecordedSpan, request: IngressRequest, scope: Scope) -> None:
    """End the span of a request; most of its attributes are set when it is exported."""
    response = request.response
    status = response.status
    is_cut = not response.is_complete and not request.is_socket
    if request.cause or status >= 500 or not status or is_cut:
        kind = request.cause or (str(status) if status >= 500 else "cancelled")
        span.set_attribute("error.type", kind)
        if status >= 500 or not status or is_cut:
            span.fail(kind)
    route = None if request.route is NO_ROUTE else request.route.route
    span.later = _complete, tracing, scope, route, request.host, response.request_id, status
    span.end()


def _complete(
    span: RecordedSpan,
    tracing: Tracing,
    scope: Scope,
    route: str | None,
    host: bytes,
    request_id: bytes,
    status: int,
) -> None:
    found = span.own
    assert found is not None
    found["url.path"] = found["url.path"][:MAX_TEXT]
    found["daskserve.request_id"] = request_id.decode("latin-1")
    method = scope.get("method", "GET")
    if method not in _METHODS:
        found["http.request.method_original"] = method[:MAX_TEXT]
        method = OTHER
    agent = b""
    for header, value in scope["headers"]:
        if header == b"user-agent":
            agent = value[:MAX_TEXT]
    client, server = scope.get("client"), scope.get("server")
    key = (
        method,
        route,
        status,
        scope.get("scheme", "http"),
        scope.get("http_version", "1.1"),
        server and tuple(server),
        host[:MAX_TEXT],
        client and client[0],
        agent,
    )
    span.template = tracing.templates.get(key, _template, tracing.unrouted.kind)
