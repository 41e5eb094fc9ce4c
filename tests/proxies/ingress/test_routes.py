from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.proxies.ingress.routes import Route, RouteTable


def table(*routes: str) -> RouteTable:
    return RouteTable({route: {"endpoint": f"at {route}", "methods": ["GET"]} for route in routes})


@pytest.mark.parametrize(
    ("routes", "path", "expected"),
    [
        (["/route"], "/route", "/route"),
        (["/route"], "/route/", "/route"),
        (["/route"], "/route/below/it", "/route"),
        (["/route"], "/routesuffix", None),
        (["/route"], "/rout", None),
        (["/route"], "/", None),
        (["/route"], "/other/route", None),
        (["/route/"], "/route", "/route"),
        (["/route/"], "/route/x", "/route"),
        (["/"], "/", "/"),
        (["/"], "/anything/at/all", "/"),
        (["/"], "", "/"),
        (["/"], "//", "/"),
        (["/a", "/a/b"], "/a/b", "/a/b"),
        (["/a", "/a/b"], "/a/b/c", "/a/b"),
        (["/a", "/a/b"], "/a/bc", "/a"),
        (["/a", "/a/b/c"], "/a/b", "/a"),
        (["/", "/a"], "/b", "/"),
        (["/a/b"], "/a//b", None),
        (["/a"], "//a", None),
        (["/ä"], "/ä/x", "/ä"),
        ([], "/", None),
        ([], "/a", None),
    ],
)
def test_the_longest_route_that_ends_at_a_slash_matches(
    routes: list[str], path: str, expected: str | None
) -> None:
    found = table(*routes).match(path)
    assert (found.route if found else None) == expected


def test_a_route_carries_its_endpoint_and_methods_in_upper_case() -> None:
    routes = RouteTable({"/a/": {"endpoint": "one", "methods": ["get", "POST"]}})
    assert routes.match("/a") == Route("/a", "one", frozenset({"GET", "POST"}))


def test_endpoints_lists_each_route_once() -> None:
    routes = table("/b", "/", "/a/")
    assert routes.endpoints() == {"/": "at /", "/a": "at /a/", "/b": "at /b"}
    assert len(routes) == 3


def test_a_path_costs_no_more_lookups_than_the_deepest_route_has_segments() -> None:
    class CountingPath(str):
        finds = 0

        def find(self, *args: object) -> int:
            CountingPath.finds += 1
            return str.find(self, *args)  # type: ignore[arg-type]

    assert table("/a/b", "/c").match(CountingPath("/x" * 10_000)) is None
    assert CountingPath.finds == 2


segments = st.lists(st.sampled_from(["a", "b", "ab"]), max_size=4)
paths = segments.map(lambda parts: "/" + "/".join(parts))


@given(st.sets(paths, max_size=8), paths)
def test_match_agrees_with_a_search_through_all_routes(routes: set[str], path: str) -> None:
    candidates = [r for r in routes if r == "/" or path == r or path.startswith(r + "/")]
    found = table(*routes).match(path)
    assert (found.route if found else None) == max(candidates, key=len, default=None)
