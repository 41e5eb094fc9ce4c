"""What the ingress counts, and that clients cannot make it count without bounds."""

from __future__ import annotations

import pytest

from daskserve.figures.histogram import HistogramCounts
from daskserve.proxies.ingress.figures import MAX_ROUTES, NO_ROUTE, SYSTEM_ROUTES, IngressFigures
from daskserve.proxies.ingress.routes import Route

ROUTE = Route("/a", "e", frozenset(("GET",)))


def series(figures: IngressFigures, name: str) -> dict[tuple[str, ...], float]:
    return {
        labels: value.count if isinstance(value, HistogramCounts) else value
        for found, labels, value in figures.samples("i")
        if found == name
    }


def test_responses_are_counted_by_route_method_and_status() -> None:
    figures = IngressFigures()
    for method, status in (("GET", 200), ("GET", 200), ("POST", 200), ("GET", 503)):
        figures.observe(ROUTE, method, status, 0.01, "timeout" if status == 503 else "")
    figures.observe(SYSTEM_ROUTES["/-/healthz"], "GET", 200, 0.01, "")
    assert series(figures, "http_requests") == {
        ("i", "/a", "e", "GET", "200"): 2,
        ("i", "/a", "e", "POST", "200"): 1,
        ("i", "/a", "e", "GET", "503"): 1,
        ("i", "/-/healthz", "", "GET", "200"): 1,
    }
    assert series(figures, "http_errors") == {("i", "/a", "e", "timeout"): 1}
    assert series(figures, "http_request_duration_seconds")[("i", "/a", "e")] == 4
    assert figures.latency.count == 5


def test_invented_paths_and_methods_create_few_series() -> None:
    figures = IngressFigures()
    for number in range(1000):
        figures.observe(NO_ROUTE, f"METHOD{number}", 404, 0.01, "no_route")
        figures.observe(ROUTE, f"METHOD{number}", 405, 0.01, "method_not_allowed")
    assert series(figures, "http_requests") == {
        ("i", "", "", "OTHER", "404"): 1000,
        ("i", "/a", "e", "OTHER", "405"): 1000,
    }


@pytest.mark.parametrize(
    ("status", "code"), [(0, "499"), (99, "599"), (100, "100"), (599, "599"), (600, "599"), (12345, "599")]
)
def test_a_status_that_is_none_has_no_label_of_its_own(status: int, code: str) -> None:
    figures = IngressFigures()
    figures.observe(ROUTE, "GET", status, 0.01, "")
    assert list(series(figures, "http_requests")) == [("i", "/a", "e", "GET", code)]


def test_websockets_are_counted_and_how_long_they_were_open_is_not() -> None:
    figures = IngressFigures()
    figures.observe(ROUTE, "WEBSOCKET", 101, 86400.0, "")
    assert series(figures, "http_requests") == {("i", "/a", "e", "WEBSOCKET", "101"): 1}
    assert series(figures, "http_request_duration_seconds") == {("i", "/a", "e"): 0}


def test_metrics_of_deleted_routes_are_dropped_beyond_a_limit() -> None:
    figures = IngressFigures()
    figures.observe(NO_ROUTE, "GET", 404, 0.01, "no_route")
    for number in range(MAX_ROUTES - 1):
        figures.observe(Route(f"/{number}", "e", frozenset()), "GET", 200, 0.01, "")
    figures.keep({"/0": "e"})
    assert len(series(figures, "http_requests")) == MAX_ROUTES
    figures.observe(ROUTE, "GET", 200, 0.01, "")
    figures.keep({"/0": "e", "/a": "e", "/1": "another"})
    assert figures.latency.count == MAX_ROUTES + 1  # what is counted of all routes only grows
    assert set(series(figures, "http_requests")) == {
        ("i", "", "", "GET", "404"),
        ("i", "/0", "e", "GET", "200"),
        ("i", "/a", "e", "GET", "200"),
    }
