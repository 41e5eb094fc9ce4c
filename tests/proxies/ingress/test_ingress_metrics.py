"""The metrics of the ingress; clients cannot make their number grow without bounds."""

from __future__ import annotations

from tables import each_case

from daskserve.proxies.ingress.metrics import MAX_MATCHED, MAX_ROUTES, NO_ROUTE, SYSTEM_ROUTES, IngressMetrics
from daskserve.proxies.ingress.routes import Route
from daskserve.telemetry.histogram import HistogramCounts

ROUTE = Route("/a", "e", frozenset(("GET",)))


def series(metrics: IngressMetrics, name: str) -> dict[tuple[str, ...], float]:
    return {
        labels: value.count if isinstance(value, HistogramCounts) else value
        for found, labels, value in metrics.samples("i")
        if found == name
    }


def test_responses_are_counted_by_route_method_and_status() -> None:
    metrics = IngressMetrics()
    for method, status in (("GET", 200), ("GET", 200), ("POST", 200), ("GET", 503)):
        metrics.observe(ROUTE, method, status, 0.01, "timeout" if status == 503 else "")
    metrics.observe(SYSTEM_ROUTES["/-/healthz"], "GET", 200, 0.01, "")
    assert series(metrics, "http_requests") == {
        ("i", "/a", "e", "GET", "200"): 2,
        ("i", "/a", "e", "POST", "200"): 1,
        ("i", "/a", "e", "GET", "503"): 1,
        ("i", "/-/healthz", "", "GET", "200"): 1,
    }
    assert series(metrics, "http_errors") == {("i", "/a", "e", "timeout"): 1}
    assert series(metrics, "http_request_duration_seconds")[("i", "/a", "e")] == 4
    assert metrics.latency.count == 5


def test_invented_paths_and_methods_create_few_series() -> None:
    metrics = IngressMetrics()
    for number in range(1000):
        metrics.observe(NO_ROUTE, f"METHOD{number}", 404, 0.01, "no_route")
        metrics.observe(ROUTE, f"METHOD{number}", 405, 0.01, "method_not_allowed")
    assert series(metrics, "http_requests") == {
        ("i", "", "", "OTHER", "404"): 1000,
        ("i", "/a", "e", "OTHER", "405"): 1000,
    }


@each_case(
    ("status", "code"), [(0, "499"), (99, "599"), (100, "100"), (599, "599"), (600, "599"), (12345, "599")]
)
def test_a_status_that_is_none_has_no_label_of_its_own(status: int, code: str) -> None:
    metrics = IngressMetrics()
    metrics.observe(ROUTE, "GET", status, 0.01, "")
    assert list(series(metrics, "http_requests")) == [("i", "/a", "e", "GET", code)]


def test_websockets_are_counted_and_how_long_they_were_open_is_not() -> None:
    metrics = IngressMetrics()
    metrics.observe(ROUTE, "WEBSOCKET", 101, 86400.0, "")
    assert series(metrics, "http_requests") == {("i", "/a", "e", "WEBSOCKET", "101"): 1}
    assert series(metrics, "http_request_duration_seconds") == {("i", "/a", "e"): 0}


def test_routes_within_an_application_are_counted_apart_up_to_a_limit() -> None:
    metrics = IngressMetrics()
    for _ in range(3):
        metrics.observe(ROUTE, "GET", 200, 0.01, "", "/items/{id}")
        metrics.observe(ROUTE, "GET", 404, 0.01, "")  # no route of the application has matched
        metrics.observe(Route("/", "root", frozenset()), "GET", 200, 0.01, "", "/items/{id}")
    assert series(metrics, "http_requests") == {
        ("i", "/a/items/{id}", "e", "GET", "200"): 3,
        ("i", "/a", "e", "GET", "404"): 3,
        ("i", "/items/{id}", "root", "GET", "200"): 3,
    }
    assert metrics.totals()["endpoints"] == {"e": [6, 0], "root": [3, 0]}
    for number in range(2 * MAX_MATCHED):
        metrics.observe(ROUTE, "GET", 200, 0.01, "", f"/made/up/{number}")
    found = series(metrics, "http_requests")
    assert len(found) == MAX_MATCHED + 3
    assert found["i", "/a", "e", "GET", "200"] == MAX_MATCHED + 1


def test_metrics_of_deleted_routes_are_dropped_beyond_a_limit() -> None:
    metrics = IngressMetrics()
    metrics.observe(NO_ROUTE, "GET", 404, 0.01, "no_route")
    for number in range(MAX_ROUTES - 1):
        metrics.observe(Route(f"/{number}", "e", frozenset()), "GET", 200, 0.01, "")
    metrics.keep({"/0": "e"})
    assert len(series(metrics, "http_requests")) == MAX_ROUTES
    metrics.observe(ROUTE, "GET", 200, 0.01, "")
    metrics.keep({"/0": "e", "/a": "e", "/1": "another"})
    assert metrics.latency.count == MAX_ROUTES + 1  # the total over all routes never decreases
    assert set(series(metrics, "http_requests")) == {
        ("i", "", "", "GET", "404"),
        ("i", "/0", "e", "GET", "200"),
        ("i", "/a", "e", "GET", "200"),
    }


def test_totals_add_up_all_routes_of_an_endpoint() -> None:
    metrics = IngressMetrics()
    for route in (ROUTE, Route("/b", "e", frozenset(("GET",))), Route("/c", "f", frozenset(("GET",)))):
        for status in (200, 404, 500, 503):
            metrics.observe(route, "GET", status, 0.01, "")
    metrics.observe(NO_ROUTE, "GET", 502, 0.01, "")
    found = metrics.totals()
    assert (found["ended"], found["failed"]) == (13, 7)
    assert found["endpoints"] == {"e": [8, 4], "f": [4, 2]}
    assert sum(found["latency_counts"]) == 13
