"""The factories of a Host's actors: thin wrappers that only connect the layers' own objects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskserve.cluster.protocols.base import ActorContext, verb, verbs_of
from daskserve.common.types import STORE_TAKEN, UNREADY, ActorRequest, BodyUse, Envelope
from daskserve.data.caller.calls.handle import routers_of
from daskserve.data.replica.local_code import LocalCode
from daskserve.data.replica.process.code import ChildCode
from daskserve.data.replica.process.listening import listening_children
from daskserve.data.replica.process.port import Port, with_children
from daskserve.data.replica.replica import Replica
from daskserve.errors import BadRequestError, ServeError
from daskserve.internals.otlp_exporter import post_of
from daskserve.options.start_messages import ProxyStart, ReplicaStart, read_http
from daskserve.payload.importing import call_imported
from daskserve.proxies.listener import HTTPListener, Requests
from daskserve.proxies.server.listen import check_ports
from daskserve.telemetry.logs.records import LOGGING
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.enabling import enable

if TYPE_CHECKING:
    from daskserve.data.caller.routing.router import Routers
    from daskserve.data.replica.process.listening import ListeningChildren
    from daskserve.proxies.ingress.app import CallBackend, IngressApp

logger = logging.getLogger("daskserve.actors")


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


class RoutedRequests(Requests):
    """Requests that the routers of this process send; see `daskserve.proxies.listener.Requests`."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers

    @property
    def largest_body_bytes(self) -> float:
        return self._routers.body_limits.largest_bytes

    def prepare(self, endpoint: str) -> None:
        self._routers.router(endpoint)

    @property
    def send(self) -> CallBackend:
        return self._routers.send

    def body_rules(self, endpoint: str, default_max_bytes: int) -> tuple[BodyUse, int] | None:
        return self._routers.router(endpoint).body_rules(default_max_bytes)

    def wait_until_published(self, endpoint: str) -> Awaitable[None]:
        return self._routers.router(endpoint).wait_until_published()

    def check_queue(self, endpoint: str) -> None:
        self._routers.router(endpoint).check_queue()

    def is_elsewhere(self, endpoint: str) -> bool:
        return False

    def is_crowded(self, endpoint: str) -> bool:
        return self._routers.router(endpoint).is_crowded


class ProxyActor:
    """One HTTP listener with its ingress; the process's routers are shared."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self.verbs = verbs_of(self)
        self._cluster = context.cluster
        self._start = ProxyStart.decode(context.spec.payload)
        self._routes_known = asyncio.Event()
        self._listener: HTTPListener | None = None
        #: The children that serve connections of this proxy, and its port. None without ``replicas_listen``.
        self._children: ListeningChildren | None = None
        self._port: Port | None = None
        self._watches: list[Any] = []

    async def start(self) -> dict[str, Any]:
        """Listen once the route table is known; return the port and the URLs."""
        routers = await routers_of(self._cluster)
        context = self._context
        listener = self._listener = HTTPListener(
            self._start,
            RoutedRequests(routers),
            name=context.spec.name,
            instance=context.spec.instance,
            clock=context.clock,
            rng=context.rng,
            logs=context.logs,
        )
        if replicas_listen(self._start):
            self._children = listening_children(self._cluster)
        watch = self._cluster.listener.watch
        self._watches = [
            watch("routes", self._update_routes),
            watch(UNREADY, self._update_unready),
            watch(STORE_TAKEN, self._update_store_taken),
            watch(LOGGING, self._update_logging),
            watch("system", routers.suspects.update_system_workers),
        ]
        await listener.bind(enable(context, self._start.tracing, call_imported, post_of))
        assert listener.server is not None
        try:
            await self._context.clock.wait_for(self._routes_known.wait(), ROUTES_S)
        except TimeoutError:
            logger.warning("Listening without routes: the controller did not answer in %s s", ROUTES_S)
        listener.start()
        if self._children is not None:
            self._port = self._open_port(self._children, routers, listener)
        return {"port": listener.server.port, "urls": list(listener.server.urls)}

    def _open_port(self, children: ListeningChildren, routers: Routers, listener: HTTPListener) -> Port:
        options = read_http({**vars(self._start.options), "health_port": None})
        port = children.open_port(
            self._context.spec.name,
            replace(self._start, options=options).encode(),
            listener.max_connections,
            listener.serve,
            lambda endpoint: routers.router(endpoint).body_rules(options.max_body_bytes),
            is_only=options.location == "HeadOnly",
        )
        port.on_offer = listener.give_to(port.taker_of, port.given, port.evict)
        return port

    async def stop(self, grace_s: float) -> None:
        """Close the port, and let running requests finish for up to ``grace_s``.

        A second call, for example by a new controller, waits for the same requests, up to its own
        ``grace_s``.
        """
        for stop_watching in self._watches:
            stop_watching()
        self._watches = []
        stopping = [] if self._listener is None else [self._listener.stop(grace_s)]
        if self._children is not None and self._port is not None:
            stopping.append(self._children.close_port(self._port, grace_s))
        await asyncio.gather(*stopping)

    def health(self) -> dict[str, Any]:
        """Return the number of requests in flight; a proxy does not check its own health."""
        ingress = self._ingress
        return {} if ingress is None else self._with_children({"ongoing": ingress.ongoing})

    def metrics(self) -> dict[str, Any]:
        """Return the counts that the controller reads every second while a client watches live metrics."""
        if self._ingress is None:
            return {"ended": 0}
        counts = {"ongoing": self._ingress.ongoing, **self._ingress.metrics.totals()}
        return self._with_children(counts)

    def handle(self, envelope: Envelope) -> ActorRequest:
        raise BadRequestError("A proxy accepts requests only over HTTP.")

    @verb
    async def wait_for_snapshot(self, epoch: int, counter: int, timeout_s: float) -> None:
        """Return once this proxy has applied the change of the instance."""
        await self._cluster.listener.wait_for_snapshot((epoch, counter), timeout_s)
        if self._children is not None:
            await self._context.clock.wait_for(self._children.wait_until_notified(), timeout_s)

    @verb
    async def statistics(self) -> dict[str, Any]:
        """Return the ingress's request counts and latencies."""
        if self._ingress is None:
            raise ServeError("The proxy is still starting.")
        latency = self._ingress.metrics.latency
        found = {
            "ongoing": self._ingress.ongoing,
            "responses": self._ingress.responses(),
            "handled_total": latency.count,
            "latency_counts": list(latency.counts),
            "latency_sum_s": latency.sum,
        }
        return self._with_children(found)

    def samples(self) -> list[MetricSample]:
        """Return the metrics; see `daskserve.telemetry.table.Source`."""
        children = [] if self._port is None else self._port.samples()
        return [*([] if self._listener is None else self._listener.samples()), *children]

    def _with_children(self, counts: dict[str, Any]) -> dict[str, Any]:
        return counts if self._port is None else with_children(counts, self._port.samples())

    @property
    def _ingress(self) -> IngressApp | None:
        return None if self._listener is None else self._listener.ingress

    def _update_routes(self, value: Any) -> None:
        if value is None or self._listener is None:
            return
        # The routers are created now: the first request of a new route does not wait for its router.
        self._listener.update_routes(value)
        self._tell_children(routes=value)
        self._routes_known.set()

    def _update_store_taken(self, value: Any) -> None:
        if self._listener is not None:
            self._listener.is_store_taken = bool(value)
            self._tell_children(is_store_taken=bool(value))

    def _update_logging(self, value: Any) -> None:
        if value is not None and self._listener is not None:
            self._listener.configure_logs(value["config"])
            self._tell_children(logging=value["config"])

    def _update_unready(self, value: Any) -> None:
        if self._listener is not None:
            self._listener.unready = value
            self._tell_children(unready=value)

    def _tell_children(self, **facts: Any) -> None:
        if self._children is not None:
            self._children.note(**facts)


def replicas_listen(start: ProxyStart) -> bool:
    """Return whether replicas listen: as the options say, or by default if that is possible.

    Connections with TLS cannot move, and middlewares may rely on seeing all requests of a worker.
    """
    options = start.options
    if options.replicas_listen is not None:
        return options.replicas_listen
    return options.ssl_certfile is None and options.proxy_callback is None and not start.middlewares


__all__ = ["ProxyActor", "check_ports", "make_controller", "make_replica", "replicas_listen"]
