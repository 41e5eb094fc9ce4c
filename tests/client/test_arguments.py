"""Arguments of the client are checked before anything is sent."""

from __future__ import annotations

import re
from typing import Any

import pytest

from daskserve.client.specs import check_endpoint_route, check_methods, check_route
from daskserve.errors import BadRequestError
from daskserve.options.http import HTTPOptions
from daskserve.types import Location


@pytest.mark.parametrize(
    "route", [None, "/", "/a/b", "/-a", "/a/-/b", "/{a}", "/a/{b}/c{d:int}", "/{p:path}"]
)
def test_routes_that_are_allowed(route: str | None) -> None:
    check_route(route)
    check_endpoint_route(route)


@pytest.mark.parametrize("route", ["/-", "/-/", "/-/x", "/-/routes", "/-/{x}"])
def test_routes_of_daskserve_itself_are_rejected(route: str) -> None:
    with pytest.raises(BadRequestError, match="route_prefix must not"):
        check_route(route)
    with pytest.raises(BadRequestError, match="route must not be below '/-', which is reserved"):
        check_endpoint_route(route)


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ("/{", "not valid; write {name} or {name:kind}"),
        ("/a}", "not valid"),
        ("/{}", "not valid"),
        ("/{a b}", "not valid"),
        ("/{x:uuid}", "one of int, float, str, path, got '/{x:uuid}'"),
        ("/{a}-{b}", "one variable at most"),
        ("/{a}/{a:int}", "different names"),
        ("/{p:path}/x", "must be the end"),
        ("/{p:path}x", "must be the end"),
        ("/{p:path}/{q:path}", "must be the end"),
    ],
)
def test_variables_that_are_not_valid_are_rejected(route: str, message: str) -> None:
    for check in (check_route, check_endpoint_route):
        with pytest.raises(BadRequestError, match=re.escape(message)):
            check(route)


@pytest.mark.parametrize("route", ["", "a", 3, b"/a"])
def test_a_route_that_is_not_a_path_is_a_type_error(route: Any) -> None:
    with pytest.raises(TypeError, match="route must be a string that starts with '/'"):
        check_endpoint_route(route)


def test_methods_are_a_list_of_http_methods() -> None:
    check_methods(["GET", "post"])
    check_methods(("PATCH",))
    for wrong in ("GET", None, [1], {"GET"}):
        with pytest.raises(TypeError, match="methods must be a list of strings"):
            check_methods(wrong)
    with pytest.raises(BadRequestError, match="at least one HTTP method"):
        check_methods([])
    with pytest.raises(BadRequestError, match=r"unknown names \['FETCH'\]; the HTTP methods are GET, "):
        check_methods(["GET", "FETCH"])


@pytest.mark.parametrize("more", [{}, {"location": "EveryWorker"}])
def test_no_host_means_no_proxies(more: dict[str, Any]) -> None:
    options = HTTPOptions(host=None, **more)
    assert options.location is Location.NO_SERVER
    assert not options.has_proxies
