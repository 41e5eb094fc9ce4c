"""Metrics of the ingress: responses by route, method and status, their durations, and the causes of errors.

Clients cannot create time series: all paths without a route share one, and so do all unregistered methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.common.types import ALL_HTTP_METHODS
from daskserve.proxies.ingress.routes import Route
from daskserve.telemetry.histogram import LatencyHistogram, TracedValue
from daskserve.telemetry.table import MetricSample

#: The registered methods; see RFC 9110 and RFC 5789. A WebSocket is counted as a method.
METHODS = frozenset((*ALL_HTTP_METHODS, "WEBSOCKET"))
OTHER_METHOD = "OTHER"
#: The status of requests whose client disconnected before the response, as in nginx.
CLIENT_GONE = 499
#: Above this number of routes, the metrics of deleted routes are dropped.
MAX_ROUTES = 1000
#: Maximum number of routes of one application that have separate metrics.
MAX_MATCHED = 200

#: The paths of the health check (can this proxy take requests?) and of the readiness check (does every
#: deployment that should run have a replica?).
HEALTHZ, READYZ = "/-/healthz", "/-/readyz"
#: The route of requests that match no route, and the routes that the ingress itself answers.
NO_ROUTE = Route("", "", frozenset())
SYSTEM_ROUTES: Mapping[str, Route] = {
    path: Route(path, "", frozenset(("GET", "HEAD"))) for path in (HEALTHZ, READYZ, "/-/routes")
}


class RouteMetrics:
    """The counts of one route."""

    __slots__ = ("errors", "latency", "responses")

    def __init__(self) -> None:
        #: By method and status.
        self.responses: dict[tuple[str, int], int] = {}
        #: By cause, see `daskserve.telemetry.histogram.cause_of`; the ingress has some additional causes.
        self.errors: dict[str, int] = {}
        self.latency = LatencyHistogram()


class IngressMetrics:
    """The counts of one ingress."""

    def __init__(self) -> None:
        #: By route, endpoint, and matched route within the endpoint's application.
        self._routes: dict[tuple[str, str, str], RouteMetrics] = {}
        #: The number of matched routes with separate metrics, by endpoint.
        self._matched: dict[str, int] = {}
        #: The number of requests with an invalid id, which is replaced.
        self.bad_ids = 0
        #: The durations of dropped routes.
        self._dropped = LatencyHistogram()

    @property
    def latency(self) -> LatencyHistogram:
        """The durations of all requests, including those of dropped routes."""
        total = LatencyHistogram()
        for each in [self._dropped, *(metrics.latency for metrics in self._routes.values())]:
            total.add(each.counts, each.sum)
        return total

    def observe(
        self,
        route: Route,
        method: str,
        status: int,
        seconds: float,
        cause: str,
        matched: str = "",
        span: TracedValue | None = None,
    ) -> None:
        """Count a request that has ended.

        ``cause`` is empty without an error. ``matched`` is empty unless the application reports which of its
        routes has matched.
        """
        metrics = self._routes.get((route.route, route.endpoint, matched))
        if metrics is None:
            metrics = self._metrics_of(route, matched)
        responses = metrics.responses
        key = (method, status)
        if key not in responses:  # the method may be unregistered, or the status unusual
            if not 100 <= status <= 599:
                status = CLIENT_GONE if not status else 599
            key = (method if method in METHODS else OTHER_METHOD, status)
            responses.setdefault(key, 0)
        responses[key] += 1
        if cause:
            metrics.errors[cause] = metrics.errors.get(cause, 0) + 1
        if method != "WEBSOCKET":  # a connection may be open for days
            metrics.latency.observe(seconds)
            if span is not None:
                metrics.latency.note_trace(seconds, span)

    def _metrics_of(self, route: Route, matched: str) -> RouteMetrics:
        # An application may report any number of routes; only the first ones have separate metrics.
        known = self._matched.get(route.endpoint, 0)
        if matched and known >= MAX_MATCHED:
            matched = ""
        elif matched:
            self._matched[route.endpoint] = known + 1
        return self._routes.setdefault((route.route, route.endpoint, matched), RouteMetrics())

    def totals(self) -> dict[str, Any]:
        """Return the numbers of requests and 5xx responses, in total and by endpoint, and the latencies."""
        endpoints: dict[str, list[int]] = {}
        ended = failed = 0
        for (_, endpoint, _), metrics in self._routes.items():
            count = sum(metrics.responses.values())
            bad = sum(each for (_, status), each in metrics.responses.items() if status >= 500)
            ended, failed = ended + count, failed + bad
            if endpoint:
                known = endpoints.setdefault(endpoint, [0, 0])
                known[0] += count
                known[1] += bad
        counts = list(self.latency.counts)
        return {"ended": ended, "failed": failed, "latency_counts": counts, "endpoints": endpoints}

    def keep(self, routes: Mapping[str, str]) -> None:
        """Drop the metrics of routes that no longer exist, if there are many."""
        if len(self._routes) > MAX_ROUTES:
            known = {*routes.items(), *((path, "") for path in ("", *SYSTEM_ROUTES))}
            for key, each in list(self._routes.items()):
                if key[:2] not in known:
                    del self._routes[key]
                    self._matched.pop(key[1], None)
                    self._dropped.add(each.latency.counts, each.latency.sum)

    def samples(self, instance: str) -> list[MetricSample]:
        """Return all metrics."""
        found: list[MetricSample] = [("http_limited_requests", (instance, "request_id"), self.bad_ids)]
        for (route, endpoint, matched), metrics in list(self._routes.items()):
            labels = (instance, f"{route.rstrip('/')}{matched}" if matched else route, endpoint)
            found.append(("http_request_duration_seconds", labels, metrics.latency))
            for (method, status), count in list(metrics.responses.items()):
                found.append(("http_requests", (*labels, method, str(status)), count))
            for cause, count in list(metrics.errors.items()):
                found.append(("http_errors", (*labels, cause), count))
        return found
