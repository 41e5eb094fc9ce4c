"""The ingress: one ASGI application between the HTTP server and the routers.

It finds the route, assigns the request an id, applies its timeout and turns errors into responses. This code
runs for every request, so it reads each header once and awaits only the dispatch. The scope that it passes on
contains only plain values, which can be sent over a channel.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from daskserve.common.clock import RequestIds, stopwatch
from daskserve.common.formatting import counted, shown
from daskserve.common.types import Envelope, EnvelopeKind, Receive, Send
from daskserve.errors import ActorLostError, RequestTimeoutError
from daskserve.loops.deadlines import until
from daskserve.payload.packed_errors import is_logged, known_of, note_logged
from daskserve.proxies.asgi import JSON, LOST_REPLICA, ASGIApp, Headers, Scope, send_whole
from daskserve.proxies.ingress.access import AccessLog
from daskserve.proxies.ingress.bodies import BodyMiddleware, BodyPreparation, cancellable, is_refused
from daskserve.proxies.ingress.errors import reply_to
from daskserve.proxies.ingress.metrics import READYZ, SYSTEM_ROUTES, IngressMetrics
from daskserve.proxies.ingress.request import (
    TRUSTED_TIMEOUT,
    IngressRequest,
    WebSocketResponse,
    parameter_of,
    parse_timeout,
    response_to,
)
from daskserve.proxies.ingress.routes import Route, RouteTable, normalize_prefix
from daskserve.proxies.ingress.tracing import begin_trace, end_trace
from daskserve.telemetry.histogram import cause_of
from daskserve.telemetry.tracing.carrier import TRACE

if TYPE_CHECKING:
    from starlette.middleware import Middleware

    from daskserve.options.http import HTTPOptions
    from daskserve.telemetry.tracing.process import Tracing

log = logging.getLogger("daskserve.proxies")

CallBackend = Callable[[str, Envelope, Receive, Send], Coroutine[Any, Any, None]]

#: The ASGI extension for HTTP responses to a WebSocket's handshake.
DENIAL = "websocket.http.response"

NOT_POPULATED = "Route table is not populated yet."
DRAINING = "This node is being drained."
NO_ROUTES = "There is no route yet."
#: The status is a success, so that load balancers keep sending requests: there may be no other proxy. The
#: text is for operators.
STORE_IS_TAKEN = b"success, but another cluster has taken over the store of this instance"

#: The keys of the scope of a request; see https://asgi.readthedocs.io/en/latest/specs/www.html
_SCOPE_KEYS = frozenset(
    (
        "type",
        "asgi",
        "http_version",
        "method",
        "scheme",
        "path",
        "raw_path",
        "query_string",
        "root_path",
        "headers",
        "client",
        "server",
        "subprotocols",
    )
)
#: Keys that belong to this process, even if their values are plain.
_SCOPE_KEYS_KEPT_HERE = frozenset(("app", "state", "extensions", TRUSTED_TIMEOUT))
_PLAIN_TYPES = (str, bytes, int, float, type(None))


class IngressApp:
    """The ASGI application in front of all endpoints.

    Parameters
    ----------
    options : HTTPOptions
        ``root_path``, ``request_timeout_s``, ``debug``, ``list_routes`` and ``model_id_parameter``.
    routes : RouteTable, optional
        None before the first one is received; see the attribute.
    dispatch : callable
        ``await dispatch(endpoint, envelope, receive, send)`` answers the request. The envelope's head
        is the ASGI scope with ``extensions["daskserve"]`` of ``request_id``, ``shard_key`` and ``route``.
    rng : random.Random
        Generates the ids of requests without one.
    is_direct : bool
        Whether the server calls the ingress without middlewares, which might keep the scope.
    bodies : BodyPreparation, optional
        Limits the size of bodies, and gathers those that their backend needs as a whole.
    unready : callable, optional
        Returns the names of the backends that should run and have no replica; None if that is not known.
    is_store_taken : callable, optional
        Returns whether another cluster has taken over the store of this instance.
    access_log : AccessLog, optional
        Logs each request that has ended.
    tracing : Tracing, optional
        Creates the spans of sampled requests.

    Attributes
    ----------
    routes : RouteTable or None
        The current routes. The listener replaces them.
    ongoing : int
        Requests in flight.
    unanswered : int
        Requests that ended without a response, because the client disconnected or the server stopped.
    timed_out : int
        Requests that timed out, before or during the response.
    """

    def __init__(
        self,
        *,
        options: HTTPOptions,
        routes: RouteTable | None,
        dispatch: CallBackend,
        rng: random.Random,
        is_direct: bool = False,
        bodies: BodyPreparation | None = None,
        unready: Callable[[], Collection[str] | None] = tuple,
        is_store_taken: Callable[[], bool] = bool,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._access_log = access_log
        self._tracing = tracing
        self._unready = unready
        self._is_store_taken = is_store_taken
        self._bodies = bodies
        self._root = normalize_prefix(options.root_path)
        self._root_bytes = self._root.encode()
        self._timeout_s = options.request_timeout_s
        self._options = options
        self.routes = routes
        self._dispatch = dispatch
        self._is_direct = is_direct
        self._request_ids = RequestIds(rng)
        self._is_draining = False
        self.ongoing = self.unanswered = self.timed_out = 0
        self._responses = [0] * 10
        self.metrics = IngressMetrics()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        kind = scope["type"]
        if kind == "http" or kind == "websocket":
            response = response_to(send) if kind == "http" else WebSocketResponse(send)
            request = IngressRequest(scope["headers"], response)
            if self._tracing is not None or request.has_trace_headers:
                begin_trace(self._tracing, request, scope)
            return self._serve(request, scope, receive)
        if kind == "lifespan":
            return _serve_lifespan(receive, send)
        raise ValueError(f"the ingress does not support scopes of type {kind!r}")

    def start_draining(self) -> None:
        """Answer ``/-/healthz`` with 503 from now on; other requests are served as before."""
        self._is_draining = True

    def responses(self) -> dict[str, int]:
        """Return the number of responses that were started, by status class: ``{"2xx": 7, ...}``."""
        return {f"{leading}xx": count for leading, count in enumerate(self._responses) if count}

    def __repr__(self) -> str:
        state = "draining" if self._is_draining else "open"
        return f"<IngressApp {state}, {self.ongoing} ongoing, {sum(self._responses)} answered>"

    async def _serve(self, request: IngressRequest, scope: Scope, receive: Receive) -> None:
        response = request.response
        if not response.request_id:
            response.request_id = self._request_ids.next().encode()
            self.metrics.bad_ids += request.has_bad_id
        started = stopwatch()
        self.ongoing += 1
        try:
            await self._answer(request, scope, receive)
        except Exception as error:
            if response.is_gone:
                raise
            await self._answer_error(request, error)
        finally:
            self.ongoing -= 1
            # Requests that are refused because of their body are counted by the server.
            if response.status or not (request.has_body and is_refused(receive)):
                seconds = stopwatch() - started
                method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
                self.metrics.observe(
                    request.route,
                    method,
                    response.status,
                    seconds,
                    request.cause,
                    response.matched_route,
                    request.span,
                )
                if self._access_log is not None:
                    self._access_log.note(request, scope, seconds)
                if response.status:
                    self._responses[response.status // 100 % 10] += 1
                else:
                    self.unanswered += 1
            if request.span is not None and self._tracing is not None:
                end_trace(self._tracing, request.span, request, scope)

    def _answer(self, request: IngressRequest, scope: Scope, receive: Receive) -> Awaitable[None]:
        # Not a coroutine, which would add a frame to each step of the request.
        path = own_path = scope["path"]
        if self._root:
            path, own_path = self._split_root(path)
        # The handshake of a WebSocket is a GET; its scope has no method.
        method = scope.get("method", "GET")
        if own_path.startswith("/-/") and own_path in SYSTEM_ROUTES:
            request.route = SYSTEM_ROUTES[own_path]
            return self._answer_system(request, own_path, method)
        table = self.routes
        if table is None:
            request.cause = "no_routes_yet"
            return self._refuse(request, 503, NOT_POPULATED, ((b"retry-after", b"1"),))
        route = table.match(own_path)
        if route is None:
            request.cause = "no_route"
            return self._refuse_path(request, scope, path)
        request.route = route
        if method not in route.methods and not route.takes_any_method:
            request.cause = "method_not_allowed"
            return self._refuse_method(request, method, route.methods)
        return self._call(request, route.endpoint, self._head(request, scope, path, route), receive)

    def _split_root(self, path: str) -> tuple[str, str]:
        """Return a path with the prefix ``root_path``, and without it."""
        root = self._root
        # Some reverse proxies remove the prefix. ASGI requires it in `path`; routes do not have it.
        if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
            return path, path[len(root) :] or "/"
        return root + path, path

    def endpoint_of(self, path: str) -> str | None:
        """Return the endpoint that answers requests for a path; None if there is none."""
        table = self.routes
        route = None if table is None else table.match(self._split_root(path)[1] if self._root else path)
        return None if route is None else route.endpoint

    async def _answer_system(self, request: IngressRequest, path: str, method: str) -> None:
        if path == "/-/routes" and not self._options.list_routes:
            await self._refuse(request, 404, f"Path '{path}' not found.")
            return
        if method not in ("GET", "HEAD"):
            await self._refuse_method(request, method, ("GET", "HEAD"))
            return
        table = self.routes
        if table is None:
            await self._refuse(request, 503, NOT_POPULATED)
        elif path == "/-/routes":
            body = json.dumps(table.names()).encode()
            await send_whole(request.response.send, 200, body, content_type=JSON)
        elif problem := self._problem(table, is_ready=path == READYZ):
            await self._refuse(request, 503, problem)
        else:
            await send_whole(
                request.response.send, 200, STORE_IS_TAKEN if self._is_store_taken() else b"success"
            )

    def _problem(self, table: RouteTable, *, is_ready: bool) -> str:
        """Return why a health check or readiness check fails; empty if it succeeds."""
        if self._is_draining:
            return DRAINING
        if not len(table):
            return NO_ROUTES
        names = self._unready() if is_ready else ()
        if names is None:
            return NOT_POPULATED
        if names and not self._options.list_routes:
            return f"{counted(len(names), 'deployment has', 'deployments have')} no running replica."
        return f"No replica runs of: {', '.join(names)}." if names else ""

    def _head(self, request: IngressRequest, scope: Scope, path: str, route: Route) -> dict[str, Any]:
        if request.timeout is not None:
            request.has_trusted_timeout = scope.pop(TRUSTED_TIMEOUT, False)
        if LOST_REPLICA in scope:
            request.lost = scope.pop(LOST_REPLICA)
        if self._is_direct and scope["type"] == "http":
            head: Any = scope  # it belongs to this request only
        else:
            head = dict(scope)
            # A middleware may have added a value for the endpoint.
            for key, value in scope.items():
                if key in _SCOPE_KEYS_KEPT_HERE or not (key in _SCOPE_KEYS or is_plain(value)):
                    del head[key]
        if path is not head["path"]:
            head["path"] = path
            if "raw_path" in head:
                head["raw_path"] = self._root_bytes + head["raw_path"]
        has_denial = DENIAL in (scope.get("extensions") or ())
        head["root_path"] = self._root + route.prefix
        if route.path_params is not None:
            head["path_params"] = route.path_params
        shard_key = request.shard_key
        head["extensions"] = {
            "daskserve": {
                "request_id": request.response.request_id.decode("latin-1"),
                "shard_key": None if shard_key is None else shard_key.decode("latin-1"),
                "route": route.route,
            }
        }
        if not request.model_id and self._options.model_id_parameter is not None:
            request.model_id = parameter_of(scope, self._options.model_id_parameter)
        if request.model_id:
            head["extensions"]["daskserve"]["model_id"] = request.model_id
        if request.session_id:
            head["extensions"]["daskserve"]["session_id"] = request.session_id
        if request.trace is not None:
            head[TRACE] = request.trace
        if has_denial:
            head["extensions"][DENIAL] = {}
        return head  # type: ignore[no-any-return]

    def _call(
        self, request: IngressRequest, endpoint: str, head: dict[str, Any], receive: Receive
    ) -> Awaitable[None]:
        # A WebSocket has no timeout.
        is_socket = request.is_socket
        timeout_s = None if is_socket else self._timeout_s
        if request.timeout is not None and not is_socket:
            timeout_s = parse_timeout(
                request.timeout, limit_s=timeout_s, is_trusted=request.has_trusted_timeout
            )
        gathering = None
        if request.has_body and not is_socket:
            if self._bodies is not None:
                gathering = self._bodies.prepare(endpoint, receive)
            receive = cancellable(receive)
        if timeout_s is not None:
            return self._call_until(request, endpoint, head, receive, timeout_s, gathering)
        envelope = Envelope(EnvelopeKind.HTTP, head, None, None, request.has_body or is_socket)
        envelope.has_started = request.response.has_started
        envelope.is_direct = is_socket and self._is_direct
        envelope.model_id = request.model_id
        envelope.lost = request.lost
        if gathering is None:  # the usual case
            return self._dispatch(endpoint, envelope, receive, request.response.send)
        return self._send(request, endpoint, envelope, receive, gathering)

    def _send(
        self,
        request: IngressRequest,
        endpoint: str,
        envelope: Envelope,
        receive: Receive,
        gathering: Awaitable[None] | None,
    ) -> Coroutine[Any, Any, None]:
        if gathering is None:
            return self._dispatch(endpoint, envelope, receive, request.response.send)
        envelope.has_body = True  # no longer on demand

        async def send_gathered() -> None:
            await gathering
            await self._dispatch(endpoint, envelope, receive, request.response.send)

        return send_gathered()

    async def _call_until(
        self,
        request: IngressRequest,
        endpoint: str,
        head: dict[str, Any],
        receive: Receive,
        timeout_s: float,
        gathering: Awaitable[None] | None,
    ) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        envelope = Envelope(
            EnvelopeKind.HTTP,
            head,
            deadline=deadline,
            has_body=request.has_body,
            has_started=request.response.has_started,
            model_id=request.model_id,
            lost=request.lost,
        )
        request_id = request.response.request_id.decode("latin-1")
        try:
            await until(
                deadline,
                self._send(request, endpoint, envelope, receive, gathering),
                f"Request {request_id} timed out after {shown(timeout_s)}s.",
            )
        except RequestTimeoutError:
            if request.response.is_complete:
                return  # user code continues, for example with background tasks
            self.timed_out += asyncio.get_running_loop().time() >= deadline
            raise

    async def _answer_error(self, request: IngressRequest, error: Exception) -> None:
        request.cause = cause_of(known_of(error))
        response = request.response
        request_id = response.request_id.decode("latin-1")
        if response.status:
            # The headers are sent. Closing the connection shows the client that the response is cut.
            if not is_logged(error, request_id):
                log.warning("Request %s failed after its response had begun: %r", request_id, error)
                note_logged(error, request_id)  # otherwise the server would log it again
            raise error
        response.drop_start()
        reply = reply_to(error, request_id, debug=self._options.debug)
        if reply.is_fault and not is_logged(error, request_id):
            log.error("Request %s failed", request_id, exc_info=error)
        elif (reply.hides_message or reply.status == ActorLostError.http_status) and not is_logged(
            error, request_id
        ):
            # A lost replica is rare, whereas every request may be answered with 503 for a while.
            level = logging.WARNING if reply.status == ActorLostError.http_status else logging.INFO
            log.log(level, "Request %s was answered with %d: %s", request_id, reply.status, error)
        await self._refuse(request, reply.status, reply.text, reply.headers)

    async def _refuse(self, request: IngressRequest, status: int, text: str, headers: Headers = ()) -> None:
        await send_whole(request.response.send, status, text.encode("utf-8", "replace"), headers=headers)

    def _refuse_path(self, request: IngressRequest, scope: Scope, path: str) -> Awaitable[None]:
        text = f"Path '{path}' not found."
        if self._options.list_routes:
            host = request.host.decode("latin-1") or _server_of(scope)
            url = f"{scope.get('scheme', 'http')}://{host}{self._root}/-/routes"
            text = f"{text} Ping {url} for available routes."
        return self._refuse(request, 404, text)

    async def _refuse_method(self, request: IngressRequest, method: str, allowed: Iterable[str]) -> None:
        names = sorted(name for name in allowed if name != "CONNECT")  # the server refuses that anyway
        await self._refuse(
            request,
            405,
            f"Methods {method} not allowed. Available HTTP methods are {names}.",
            ((b"allow", ", ".join(names).encode("latin-1", "replace")),),
        )


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _server_of(scope: Scope) -> str:
    host, port = scope.get("server") or ("localhost", None)
    return f"{host}:{port}" if port else str(host)


def is_plain(value: object) -> bool:
    """Return whether a value can be sent over a channel: text, bytes, numbers, and containers of these."""
    if isinstance(value, _PLAIN_TYPES):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return False


def build_app(ingress: ASGIApp, middlewares: Iterable[Middleware] = ()) -> ASGIApp:
    """Wrap Starlette ``Middleware`` objects around the ingress, the first one outermost."""
    app = ingress
    for middleware in reversed(list(middlewares)):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app if app is ingress else BodyMiddleware(app)
