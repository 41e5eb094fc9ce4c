"""What the ingress counts: responses by route, method and status, how long they took, and why some failed.

Whatever clients send, there are no more counts than there are routes, times a few: paths without a route are
counted as one, and so are all methods that nobody has registered.
"""

from __future__ import annotations

from collections.abc import Mapping

from daskserve.figures.histogram import LatencyHistogram
from daskserve.figures.table import MetricSample
from daskserve.proxies.ingress.routes import Route

#: The methods that are told apart; see RFC 9110 and RFC 5789. A WebSocket counts as a method of its own.
METHODS = frozenset(
    ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "WEBSOCKET")
)
OTHER_METHOD = "OTHER"
#: The status of requests whose client left before there was an answer, as other servers log it.
CLIENT_GONE = 499
#: Figures of routes that were deleted are dropped once there are so many routes.
MAX_ROUTES = 1000

#: Stand for requests without a route, and for those that the ingress answers by itself.
NO_ROUTE = Route("", "", frozenset())
SYSTEM_ROUTES: Mapping[str, Route] = {
    path: Route(path, "", frozenset(("GET", "HEAD"))) for path in ("/-/healthz", "/-/routes")
}


class RouteFigures:
    """The counts of one route."""

    __slots__ = ("errors", "latency", "responses")

    def __init__(self) -> None:
        #: By method and status.
        self.responses: dict[tuple[str, int], int] = {}
        #: By the words of `daskserve.figures.histogram.cause_of`, and some of the ingress's own.
        self.errors: dict[str, int] = {}
        self.latency = LatencyHistogram()


class IngressFigures:
    """The counts of one ingress."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], RouteFigures] = {}
        #: Of the routes that were dropped.
        self._dropped = LatencyHistogram()

    @property
    def latency(self) -> LatencyHistogram:
        """The durations of all requests."""
        total = LatencyHistogram()
        for each in [self._dropped, *(figures.latency for figures in self._routes.values())]:
            total.add(each.counts, each.sum)
        return total

    def observe(self, route: Route, method: str, status: int, seconds: float, cause: str) -> None:
        """Count one request that has ended; without a ``cause`` nothing went wrong in the ingress."""
        figures = self._routes.get((route.route, route.endpoint))
        if figures is None:
            figures = self._routes[(route.route, route.endpoint)] = RouteFigures()
        responses = figures.responses
        key = (method, status)
        if key not in responses:  # it may be one that is not told apart
            if not 100 <= status <= 599:
                status = CLIENT_GONE if not status else 599
            key = (method if method in METHODS else OTHER_METHOD, status)
            responses.setdefault(key, 0)
        responses[key] += 1
        if cause:
            figures.errors[cause] = figures.errors.get(cause, 0) + 1
        if method != "WEBSOCKET":  # a connection may be open for days, which says nothing
            figures.latency.observe(seconds)

    def keep(self, routes: Mapping[str, str]) -> None:
        """Drop what was counted of routes that there are no more, if it has become much."""
        if len(self._routes) > MAX_ROUTES:
            known = {*routes.items(), *((path, "") for path in ("", *SYSTEM_ROUTES))}
            for key, each in list(self._routes.items()):
                if key not in known:
                    del self._routes[key]
                    self._dropped.add(each.latency.counts, each.latency.sum)

    def samples(self, instance: str) -> list[MetricSample]:
        """Return all of it as metrics."""
        found: list[MetricSample] = []
        for (route, endpoint), figures in list(self._routes.items()):
            labels = (instance, route, endpoint)
            found.append(("http_request_duration_seconds", labels, figures.latency))
            for (method, status), count in list(figures.responses.items()):
                found.append(("http_requests", (*labels, method, str(status)), count))
            for cause, count in list(figures.errors.items()):
                found.append(("http_errors", (*labels, cause), count))
        return found
