from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.proxies.ingress.routes import Route, RouteTable


def table(*routes: str) -> RouteTable:
    return RouteTable({route: {"endpoint": f"at {route}", "methods": ["GET"]} for route in routes})


@each_case(
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
    assert routes.match("/a") == Route("/a", "one", frozenset({"GET", "POST"}), prefix="/a")


@each_case(
    ("routes", "path", "route", "prefix", "params"),
    [
        (["/api/{name}"], "/api/joe", "/api/{name}", "/api/joe", {"name": "joe"}),
        (["/api/{name}"], "/api/joe/x/y", "/api/{name}", "/api/joe", {"name": "joe"}),
        (["/api/{name}"], "/api/joe/", "/api/{name}", "/api/joe", {"name": "joe"}),
        (["/api/{name}"], "/api", None, None, None),
        (["/api/{name}"], "/api/", None, None, None),
        (["/api/{name}/x"], "/api/joe", None, None, None),
        (["/{a}/{b}"], "/1/2", "/{a}/{b}", "/1/2", {"a": "1", "b": "2"}),
        (["/{name}"], "/ä b", "/{name}", "/ä b", {"name": "ä b"}),
        (["/{name}"], "*", None, None, None),
        # From the left, fixed text comes before a variable, and a longer route before a shorter one.
        (["/api", "/api/{name}"], "/api", "/api", "/api", None),
        (["/api", "/api/{name}"], "/api/joe", "/api/{name}", "/api/joe", {"name": "joe"}),
        (["/", "/{name}"], "/", "/", "", None),
        (["/api/{name}", "/api/joe"], "/api/joe", "/api/joe", "/api/joe", None),
        (["/api/{name}", "/api/joe"], "/api/joe/x", "/api/joe", "/api/joe", None),
        (["/api/{name}/x", "/api/joe"], "/api/joe/x", "/api/joe", "/api/joe", None),
        (["/api/{name}", "/api/joe/x"], "/api/joe/y", "/api/{name}", "/api/joe", {"name": "joe"}),
        (["/api/{a}", "/api/{b}/x"], "/api/1/x", "/api/{b}/x", "/api/1/x", {"b": "1"}),
        (["/api/{a}", "/api/{b}/x"], "/api/1/y", "/api/{a}", "/api/1", {"a": "1"}),
        # Kinds.
        (["/{n:int}", "/{s}"], "/7", "/{n:int}", "/7", {"n": 7}),
        (["/{n:int}", "/{s:str}"], "/7a", "/{s:str}", "/7a", {"s": "7a"}),
        (["/{n:int}", "/{x:float}"], "/7.5", "/{x:float}", "/7.5", {"x": 7.5}),
        (["/{n:int}"], "/9999999999999999999", None, None, None),
        (["/v{n:int}", "/{s}"], "/v2", "/v{n:int}", "/v2", {"n": 2}),
        (["/{s}.json", "/{s}"], "/a.json", "/{s}.json", "/a.json", {"s": "a"}),
        (["/{p:path}", "/{s}"], "/a/b", "/{s}", "/a", {"s": "a"}),
        (["/f/{p:path}"], "/f/a/b/", "/f/{p:path}", "/f/a/b/", {"p": "a/b/"}),
        (["/f/{p:path}"], "/f/", "/f/{p:path}", "/f/", {"p": ""}),
        (["/f/{p:path}"], "/f", None, None, None),
        # Old records may contain routes that are refused today; they match as plain text.
        (["/{a b}", "/{x:uuid}"], "/1", None, None, None),
        (["/{a b}"], "/{a b}", "/{a b}", "/{a b}", None),
        (["/{a}{b}"], "/1{b}", "/{a}{b}", "/1{b}", {"a": "1"}),
    ],
)
def test_variables_match_segments_and_their_values_are_known(
    routes: list[str], path: str, route: str | None, prefix: str | None, params: dict[str, object] | None
) -> None:
    found = table(*routes).match(path)
    assert (found.route if found else None) == route
    if found is not None:
        assert (found.prefix, found.path_params, found.endpoint) == (prefix, params, f"at {route}")


def test_endpoints_lists_each_route_once() -> None:
    routes = table("/b", "/", "/a/")
    assert routes.endpoints() == {"/": "at /", "/a": "at /a/", "/b": "at /b"}
    assert len(routes) == 3


def test_a_route_of_an_application_is_listed_with_its_name() -> None:
    routes = RouteTable(
        {
            "/e": {"endpoint": "e", "methods": ["GET"]},
            "/shop": {"endpoint": "shop/cart", "methods": ["GET"], "application": "shop"},
        }
    )
    assert routes.names() == {"/e": "e", "/shop": "shop"}
    assert routes.endpoints() == {"/e": "e", "/shop": "shop/cart"}


@each_case("variable", ["", "/users/{id}"])
def test_a_pending_route_takes_only_what_no_other_route_matches(variable: str) -> None:
    def target(endpoint: str, *, pending: bool = False) -> dict[str, Any]:
        return {"endpoint": endpoint, "methods": ["GET"], "application": endpoint, "pending": pending}

    new = target("new", pending=True)
    table = RouteTable(
        {
            "/shop": target("shop"),
            "/shop/cart": new,
            "/new": new,
            **({variable: target("u")} if variable else {}),
        }
    )
    found = {path: table.match(path) for path in ("/shop/cart", "/new/x", "/other")}
    assert {path: each and each.endpoint for path, each in found.items()} == {
        "/shop/cart": "shop",
        "/new/x": "new",
        "/other": None,
    }
    assert "/new" not in table.endpoints().keys() | table.names().keys()
    assert len(table) == (2 if variable else 1)


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


@given(st.sets(paths, max_size=8), paths, st.booleans())
def test_match_agrees_with_a_search_through_all_routes(
    routes: set[str], path: str, has_variable: bool
) -> None:
    candidates = [r for r in routes if r == "/" or path == r or path.startswith(r + "/")]
    found = table(*routes, *(["/other/{x}"] if has_variable else [])).match(path)
    assert (found.route if found else None) == max(candidates, key=len, default=None)
