"""The factories of a Host's actors: thin wrappers that only connect the layers' own objects."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware

from daskserve.cluster.protocols.base import ActorContext, verb, verbs_of
from daskserve.common import settings
from daskserve.common.types import STORE_TAKEN, UNREADY, ActorRequest, Envelope
from daskserve.data.caller.calls.handle import routers_of
from daskserve.data.replica.local_code import LocalCode
from daskserve.data.replica.process.code import ChildCode
from daskserve.data.replica.replica import Replica
from daskserve.errors import BadRequestError, ServeError
from daskserve.internals.otlp_exporter import post_of
from daskserve.options.fields.secrets import read_secret
from daskserve.options.start_messages import ProxyStart, ReplicaStart
from daskserve.payload.importing import call_imported
from daskserve.payload.pickling import load_bytes
from daskserve.proxies.ingress.access import AccessLog
from daskserve.proxies.ingress.app import IngressApp, build_app
from daskserve.proxies.ingress.bodies import BodyGate
from daskserve.proxies.ingress.forwarded import ForwardedHeaders
from daskserve.proxies.ingress.routes import CurrentRoutes, RouteTable
from daskserve.proxies.server.health import health_server
from daskserve.proxies.server.life import HTTPServer
from daskserve.proxies.server.listen import can_share_ports, check_ports
from daskserve.proxies.server.tls import server_context
from daskserve.telemetry.logs.records import LOGGING
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.enabling import enable

if TYPE_CHECKING:
    from daskserve.options.http import HTTPOptions

logger = logging.getLogger("daskserve.actors")


#: How long the health checks that a proxy has accepted may take when it drains.
HEALTH_GRACE_S = 1.0
#: How long a new proxy waits for the routes before it listens without them.
ROUTES_S = 10.0


def make_controller(context: ActorContext) -> Any:
    """Return the instance's controller."""
    # Imported here because only one process of the cluster needs the control layer and pydantic.
    from daskserve.control.controller import Controller

    return Controller(context)


def make_replica(context: ActorContext) -> Any:
    """Return a replica whose user code runs in this process or a child process, as the backend specifies."""
    start = ReplicaStart.decode(context.spec.payload)
    return Replica(context, ChildCode if start.config.isolation == "process" else LocalCode)


def middlewares_from(path: str) -> list[Middleware]:
    """Return the middlewares of the function that ``proxy_callback`` names.

    Raises
    ------
    BadRequestError
        It failed, or returned something else.
    """
    found = call_imported(path, "proxy_callback")
    if not isinstance(found, list) or not all(isinstance(each, Middleware) for each in found):
        raise BadRequestError(
            f"proxy_callback={path!r} must return a list of starlette.middleware.Middleware objects, got "
            f"{found!r}"
        )
    return found


def tls_of(options: HTTPOptions) -> ssl.SSLContext | None:
    """Return the context of the proxy's HTTPS server; raise `BadRequestError` if a file is wrong."""
    password = options.ssl_keyfile_password
    if password is not None:
        password = read_secret(password, "ssl_keyfile_password", settings.process_variables())
    return server_context(options.ssl_certfile, options.ssl_keyfile, password)


class ProxyActor:
    """One HTTP listener with its ingress; the process's routers are shared."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self.verbs = verbs_of(self)
        self._cluster = context.cluster
        self._start = ProxyStart.decode(context.spec.payload)
        self._routes = CurrentRoutes()
        self._routes_known = asyncio.Event()
        self._unready: list[str] | None = None
        self._is_store_taken = False
        self._server: HTTPServer | None = None
        self._health: HTTPServer | None = None
        self._ingress: IngressApp | None = None
        self._watches: list[Any] = []
        self._access_log = self._open_access_log()

    async def start(self) -> dict[str, Any]:
        """Listen once the route table is known; return the port and the URLs."""
        self._routers = await routers_of(self._cluster)
        watch = self._cluster.listener.watch
        self._watches = [
            watch("routes", self._update_routes),
            watch(UNREADY, self._update_unready),
            watch(STORE_TAKEN, self._update_store_taken),
            watch(LOGGING, self._update_logging),
            watch("system", self._routers.suspects.update_system_workers),
        ]
        options = self._start.options
        middlewares = load_bytes(self._start.middlewares) if self._start.middlewares else []
        if options.proxy_callback is not None:
            middlewares = [*await asyncio.to_thread(middlewares_from, options.proxy_callback), *middlewares]
        self._ingress = IngressApp(
            options=options,
            routes=self._routes,
            dispatch=self._routers.send,
            rng=self._context.rng,
            is_direct=not middlewares,
            bodies=BodyGate(
                lambda endpoint: self._routers.router(endpoint).body_rules(options.max_body_bytes),
                lambda endpoint: self._routers.router(endpoint).wait_until_published(),
                lambda endpoint: self._routers.router(endpoint).check_queue(),
            ),
            unready=lambda: self._unready,
            is_store_taken=lambda: self._is_store_taken,
            access_log=self._access_log,
            tracing=enable(self._context, self._start.tracing, call_imported, post_of),
        )
        app = build_app(self._ingress, middlewares)
        if options.trusted_forwarders:
            app = ForwardedHeaders(app, options.trusted_forwarders)
        place: dict[str, Any] = {
            # Its successor on this host listens on the same port before this proxy stops.
            "reuse_port": self._start.reuse_port or can_share_ports(),
            "claims_port": self._start.claims_port,
            "public_host": self._start.public_host,
            "clock": self._context.clock,
        }
        self._server = HTTPServer(app, options, tls=tls_of(options), **place)
        self._server.consult(
            lambda: max(options.max_body_bytes, self._routers.body_limits.largest_bytes),
            self._is_crowded,
        )
        if self._access_log is not None:
            self._server.tell_refused(self._access_log.refused)
        await self._server.bind(may_move=self._start.may_move)
        self._health = health_server(self._ingress, options, **place)
        if self._health is not None:
            await self._health.bind()
        try:
            await self._context.clock.wait_for(self._routes_known.wait(), ROUTES_S)
        except TimeoutError:
            logger.warning("Listening without routes: the controller did not answer in %s s", ROUTES_S)
        self._server.start()
        if self._health is not None:
            self._health.start()
        return {"port": self._server.port, "urls": list(self._server.urls)}

    def _open_access_log(self) -> AccessLog | None:
        logs = self._context.logs
        if logs is None:
            return None
        spec = self._context.spec
        log = AccessLog(logs, self._context.clock, spec.name, spec.instance)
        log.configure(self._start.logging)
        return log

    async def stop(self, grace_s: float) -> None:
        """Close the port, and let running requests finish for up to ``grace_s``.

        A second call, as by a new controller, waits for the same requests, and ends them at its own time.
        """
        for stop_watching in self._watches:
            stop_watching()
        self._watches = []
        if self._health is not None:
            # First: who looks now finds another proxy of this host, or none.
            await self._health.drain(min(grace_s, HEALTH_GRACE_S))
            await self._health.stop()
        if self._server is not None:
            if grace_s > 0:
                if self._ingress is not None:
                    self._ingress.start_draining()
                await self._server.drain(grace_s)
            await self._server.stop()
        if self._access_log is not None:
            self._access_log.close()

    def health(self) -> dict[str, Any]:
        """Return how many requests are under way; a proxy does not check its own health."""
        return {} if self._ingress is None else {"ongoing": self._ingress.statistics().ongoing}

    def metrics(self) -> dict[str, Any]:
        """Return what the controller reads every second while somebody watches the live metrics."""
        if self._ingress is None:
            return {"ended": 0}
        return {"ongoing": self._ingress.statistics().ongoing, **self._ingress.metrics.totals()}

    def handle(self, envelope: Envelope) -> ActorRequest:
        raise BadRequestError("A proxy takes its requests over HTTP.")

    @verb
    async def wait_for_snapshot(self, epoch: int, counter: int, timeout_s: float) -> None:
        """Return once this proxy has applied that change of the instance."""
        await self._cluster.listener.wait_for_snapshot((epoch, counter), timeout_s)

    @verb
    async def statistics(self) -> dict[str, Any]:
        """Return the ingress's request counts and latencies."""
        if self._ingress is None:
            raise ServeError("The proxy is still starting.")
        counts = self._ingress.statistics()
        latency = self._ingress.metrics.latency
        return {
            "ongoing": counts.ongoing,
            "responses": dict(counts.responses),
            "handled_total": latency.count,
            "latency_counts": list(latency.counts),
            "latency_sum_s": latency.sum,
        }

    def samples(self) -> list[MetricSample]:
        """Return the metrics; see `daskserve.telemetry.table.Source`."""
        if self._ingress is None:
            return []
        instance = self._context.spec.instance
        counts = self._ingress.statistics()
        return [
            ("http_ongoing_requests", (instance,), counts.ongoing),
            ("http_timeouts", (instance,), counts.timed_out),
            ("http_cancellations", (instance,), counts.unanswered),
            *([] if self._server is None else self._server.samples(instance)),
            *([] if self._health is None else self._health.samples(instance)),
            *self._ingress.metrics.samples(instance),
        ]

    def _is_crowded(self, path: str) -> bool:
        endpoint = None if self._ingress is None else self._ingress.endpoint_of(path)
        return endpoint is not None and self._routers.router(endpoint).is_crowded

    def _update_routes(self, value: Any) -> None:
        if value is None:
            return
        table = self._routes.table = RouteTable(value)
        if self._ingress is not None:
            self._ingress.metrics.keep(table.endpoints())
        # Create the routers now, so that the first request of a new route does not wait for its router.
        for fields in value.values():
            self._routers.router(fields["endpoint"])
        self._routes_known.set()

    def _update_store_taken(self, value: Any) -> None:
        self._is_store_taken = bool(value)

    def _update_logging(self, value: Any) -> None:
        if value is not None and self._access_log is not None:
            self._access_log.configure(value["config"])

    def _update_unready(self, value: Any) -> None:
        self._unready = value


__all__ = ["ProxyActor", "check_ports", "make_controller", "make_replica"]
