"""An HTTP listener with its ingress, for proxies and for the processes of replicas."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from starlette.middleware import Middleware

from daskserve.common import settings
from daskserve.common.clock import Clock
from daskserve.common.types import BodyUse
from daskserve.errors import BadRequestError
from daskserve.loops.connection_table import MovedConnection
from daskserve.options.fields.secrets import read_secret
from daskserve.payload.importing import call_imported
from daskserve.payload.pickling import load_bytes
from daskserve.proxies.exchange.server_state import TakerOf
from daskserve.proxies.ingress.access import AccessLog
from daskserve.proxies.ingress.app import CallBackend, IngressApp, build_app
from daskserve.proxies.ingress.bodies import BodyPreparation
from daskserve.proxies.ingress.forwarded import ForwardedHeaders
from daskserve.proxies.ingress.routes import RouteTable
from daskserve.proxies.server.health import health_server
from daskserve.proxies.server.listen import can_share_ports
from daskserve.proxies.server.server import HTTPServer
from daskserve.proxies.server.tls import server_context
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.table import MetricSample

if TYPE_CHECKING:
    from daskserve.options.http import HTTPOptions
    from daskserve.options.start_messages import ProxyStart
    from daskserve.telemetry.tracing.process import Tracing

#: How long the health checks that a listener has accepted may take when it drains.
HEALTH_GRACE_S = 1.0


def middlewares_from(path: str) -> list[Middleware]:
    """Return the middlewares that the function named by ``proxy_callback`` returns.

    Raises
    ------
    BadRequestError
        The function failed, or returned something else.
    """
    found = call_imported(path, "proxy_callback")
    if not isinstance(found, list) or not all(isinstance(each, Middleware) for each in found):
        raise BadRequestError(
            f"proxy_callback={path!r} must return a list of starlette.middleware.Middleware objects, got "
            f"{found!r}"
        )
    return found


def tls_of(options: HTTPOptions) -> ssl.SSLContext | None:
    """Return the TLS context of a proxy; None without a certificate. See `server_context` for its errors."""
    password = options.ssl_keyfile_password
    if password is not None:
        password = read_secret(password, "ssl_keyfile_password", settings.process_variables())
    return server_context(options.ssl_certfile, options.ssl_keyfile, password)


class Requests(Protocol):
    """The destination of a listener's requests."""

    @property
    def largest_body_bytes(self) -> float:
        """The maximum size of a body for the endpoint that allows most."""

    @property
    def send(self) -> CallBackend:
        """The function that answers a request; see `daskserve.proxies.ingress.app.IngressApp`."""

    def prepare(self, endpoint: str) -> None:
        """Prepare for requests to an endpoint, because it has a route."""

    def body_rules(self, endpoint: str, default_max_bytes: int) -> tuple[BodyUse, int] | None:
        """Return how the bodies of an endpoint are read, and their maximum size; None if not known yet."""

    def wait_until_published(self, endpoint: str) -> Awaitable[None]:
        """Return an awaitable that ends when the rules of an endpoint are known."""

    def check_queue(self, endpoint: str) -> None:
        """Raise `BackPressureError` if no further request to an endpoint may wait for a slot."""

    def is_crowded(self, endpoint: str) -> bool:
        """Return whether requests of an endpoint wait for a slot."""

    def is_elsewhere(self, endpoint: str) -> bool:
        """Return whether another process has to answer requests of an endpoint."""


class HTTPListener:
    """An HTTP server, its health port, and the ingress behind both.

    Parameters
    ----------
    start : ProxyStart
        The options.
    requests : Requests
        Answers the requests.
    name, instance : str
        The names of the proxy and of its instance, for logs and metrics.
    logs : ProcessLogs, optional
        Writes the access log.
    """

    def __init__(
        self,
        start: ProxyStart,
        requests: Requests,
        *,
        name: str,
        instance: str,
        clock: Clock,
        rng: random.Random,
        logs: ProcessLogs | None,
    ) -> None:
        self._start, self._requests = start, requests
        self._instance, self._clock, self._rng = instance, clock, rng
        self._routes: RouteTable | None = None
        self.unready: Collection[str] | None = None
        self.is_store_taken = False
        self._access_log = None if logs is None else AccessLog(logs, clock, name, instance)
        self.configure_logs(start.logging)
        self.server: HTTPServer | None = None
        self._health: HTTPServer | None = None
        self.ingress: IngressApp | None = None

    async def bind(self, tracing: Tracing | None, files: Sequence[int] | None = None) -> None:
        """Bind the ports; with ``files``, serve the connections of a proxy instead.

        See `daskserve.proxies.server.receiver.ConnectionReceiver`.
        """
        options, requests = self._start.options, self._requests
        middlewares = load_bytes(self._start.middlewares) if self._start.middlewares else []
        if options.proxy_callback is not None:
            middlewares = [*await asyncio.to_thread(middlewares_from, options.proxy_callback), *middlewares]
        self.ingress = ingress = IngressApp(
            options=options,
            routes=self._routes,
            dispatch=requests.send,
            rng=self._rng,
            is_direct=not middlewares,
            bodies=BodyPreparation(
                lambda endpoint: requests.body_rules(endpoint, options.max_body_bytes),
                requests.wait_until_published,
                requests.check_queue,
            ),
            unready=lambda: self.unready,
            is_store_taken=lambda: self.is_store_taken,
            access_log=self._access_log,
            tracing=tracing,
        )
        if self._routes is not None:
            ingress.metrics.keep(self._routes.endpoints())
        app = build_app(ingress, middlewares)
        if options.trusted_forwarders:
            app = ForwardedHeaders(app, options.trusted_forwarders)
        server_options: dict[str, Any] = {
            # The successor on this host listens on the same port before this listener stops.
            "reuse_port": self._start.reuse_port or can_share_ports(),
            "claims_port": self._start.claims_port,
            "public_host": self._start.public_host,
            "clock": self._clock,
        }
        self.server = HTTPServer(app, options, tls=tls_of(options), **server_options)
        self.server.set_callbacks(
            lambda: max(options.max_body_bytes, requests.largest_body_bytes), self._is_crowded
        )
        if self._access_log is not None:
            self.server.on_refused(self._access_log.refused)
        if files is not None:
            self.server.receive(files, self._is_elsewhere)
            return
        await self.server.bind(may_move=self._start.may_move)
        self._health = health_server(ingress, options, **server_options)
        if self._health is not None:
            await self._health.bind()

    def start(self) -> None:
        """Start accepting connections."""
        assert self.server is not None
        self.server.start()
        if self._health is not None:
            self._health.start()

    def give_to(
        self, taker_of: TakerOf, given: Callable[[], int], evict_given: Callable[[], object]
    ) -> Callable[[bool], None]:
        """Give connections to other processes, while the returned function was last called with True.

        ``taker_of`` is called with an endpoint, and the server's with a path: see
        `daskserve.proxies.server.server.HTTPServer.give_to`.
        """
        assert self.server is not None

        def taker_of_path(path: str | None) -> Callable[[MovedConnection], bool] | None:
            endpoint = None if path is None else self._endpoint_of(path)
            return None if path is not None and endpoint is None else taker_of(endpoint)

        self.server.give_to(taker_of_path, given, evict_given)
        return self.server.set_giving

    @property
    def max_connections(self) -> int:
        """Maximum number of open connections."""
        assert self.server is not None
        return self.server.max_connections

    def serve(self, moved: MovedConnection) -> None:
        """Serve a connection that another process has served."""
        assert self.server is not None
        self.server.serve(moved)

    async def stop(
        self, grace_s: float, *, is_last: bool = True, sends_away: bool = True, gives_back: bool = False
    ) -> None:
        """Close the ports, and let running requests finish for up to ``grace_s``; idempotent.

        Parameters
        ----------
        is_last : bool
            Whether nothing listens here any more, so that health checks on open connections must fail.
        sends_away, gives_back : bool
            See `daskserve.proxies.server.server.HTTPServer.drain`.
        """
        if self._health is not None:
            # First, so that health checks reach another proxy of this host, or none.
            await self._health.drain(min(grace_s, HEALTH_GRACE_S))
            await self._health.stop()
        if self.server is not None:
            if grace_s > 0 or gives_back:
                if self.ingress is not None and is_last:
                    self.ingress.start_draining()
                await self.server.drain(grace_s, sends_away=sends_away, gives_back=gives_back)
            await self.server.stop()
        if self._access_log is not None:
            self._access_log.close()

    def update_routes(self, value: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all routes."""
        self._routes = RouteTable(value)
        if self.ingress is not None:
            self.ingress.routes = self._routes
            self.ingress.metrics.keep(self._routes.endpoints())
        for fields in value.values():
            self._requests.prepare(fields["endpoint"])

    def configure_logs(self, config: Mapping[str, Any] | None) -> None:
        """Apply the logging options of the instance."""
        if self._access_log is not None:
            self._access_log.configure(config)

    def samples(self) -> list[MetricSample]:
        """Return the metrics; see `daskserve.telemetry.table.Source`."""
        if self.ingress is None:
            return []
        instance = self._instance
        ingress = self.ingress
        return [
            ("http_ongoing_requests", (instance,), ingress.ongoing),
            ("http_timeouts", (instance,), ingress.timed_out),
            ("http_cancellations", (instance,), ingress.unanswered),
            *([] if self.server is None else self.server.samples(instance)),
            *([] if self._health is None else self._health.samples(instance)),
            *ingress.metrics.samples(instance),
        ]

    def _endpoint_of(self, path: str) -> str | None:
        return None if self.ingress is None else self.ingress.endpoint_of(path)

    def _is_crowded(self, path: str) -> bool:
        endpoint = self._endpoint_of(path)
        return endpoint is not None and self._requests.is_crowded(endpoint)

    def _is_elsewhere(self, path: str) -> bool:
        endpoint = self._endpoint_of(path)
        return endpoint is not None and self._requests.is_elsewhere(endpoint)
