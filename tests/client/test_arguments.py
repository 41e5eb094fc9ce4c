"""The client checks arguments before it sends anything."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.specs import check_endpoint_route, check_methods, split_config
from daskserve.client.functions.instances import given_http_options
from daskserve.common.types import Location
from daskserve.errors import BadRequestError, UnpicklableError
from daskserve.options.backend import BackendConfig
from daskserve.options.http import HTTPOptions
from daskserve.options.routing.route_variables import check_route


@each_case("route", [None, "/", "/a/b", "/-a", "/a/-/b", "/{a}", "/a/{b}/c{d:int}", "/{p:path}"])
def test_routes_that_are_allowed(route: str | None) -> None:
    check_route(route)
    check_endpoint_route(route)


@each_case("route", ["/-", "/-/", "/-/x", "/-/routes", "/-/{x}"])
def test_routes_of_daskserve_itself_are_rejected(route: str) -> None:
    with pytest.raises(BadRequestError, match="route_prefix must not"):
        check_route(route)
    with pytest.raises(BadRequestError, match="route must not be below '/-', which is reserved"):
        check_endpoint_route(route)


@each_case(
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


def test_options_that_cannot_be_pickled_are_refused() -> None:
    items = (each for each in "")
    with pytest.raises(UnpicklableError, match=r"user_config\['a'\] is of type generator"):
        split_config(BackendConfig(user_config={"a": items}))
    middlewares = [Middleware(ServerErrorMiddleware, handler=items)]
    with pytest.raises(UnpicklableError, match=r"middlewares\[0\]\.kwargs\['handler'\] is of type generator"):
        serve.start(http_options={"middlewares": middlewares})


@each_case("route", ["", "a", 3, b"/a"])
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


@each_case("given", [{"host": None}, {"host": None, "location": "EveryWorker"}, {"location": None}])
def test_no_host_or_location_means_no_proxies(given: dict[str, Any]) -> None:
    options = HTTPOptions(**given)
    assert options.location is Location.NO_SERVER
    assert not options.has_proxies


@each_case(
    ("theirs", "ours"),
    [
        ("Disabled", Location.NO_SERVER),
        ("HeadOnly", Location.HEAD_ONLY),
        ("EveryNode", Location.EVERY_NODE),
        (Location.EVERY_WORKER, Location.EVERY_WORKER),
    ],
)
def test_the_location_of_the_proxies_has_ray_serves_name_too(theirs: str, ours: Location) -> None:
    assert given_http_options(proxy_location=theirs).location is ours
    assert HTTPOptions(location=theirs).location is ours  # type: ignore[arg-type]
    for options in ({"port": 1}, HTTPOptions(port=1)):
        found = given_http_options(http_options=options, proxy_location=theirs)
        assert (found.port, found.location) == (1, ours)
        assert found.has_proxies == (theirs != "Disabled")
        assert found.model_fields_set == {"port", "location"}


def test_old_and_new_http_arguments_exclude_each_other() -> None:
    for old in ({"http_host": "127.0.0.1"}, {"http_port": 8000}, {"http_middlewares": []}):
        with pytest.raises(ValueError, match=f"You cannot specify both http_options and {next(iter(old))}"):
            given_http_options(**old, http_options={"port": 0})  # type: ignore[arg-type]


def test_a_wrong_or_doubled_location_is_an_error() -> None:
    with pytest.raises(ValueError, match="HeadOnly"):
        given_http_options(proxy_location="Nowhere")
    for options in ({"location": None}, HTTPOptions(location=Location.HEAD_ONLY)):
        with pytest.raises(
            ValueError, match="proxy_location is another spelling of location in http_options"
        ):
            given_http_options(http_options=options, proxy_location="EveryNode")


@each_case(
    ("function", "name", "text"),
    [
        ("run", "grpc_options", "there are no gRPC proxies"),
        ("run", "controller_options", "the controller runs in one of Dask's workers"),
        ("run_many", "proxy_location", "use 'location' of http_options"),
    ],
)
def test_arguments_that_only_ray_serve_has_say_what_to_use_instead(
    function: str, name: str, text: str
) -> None:
    match = rf"serve.{function}\(\) has no argument '{name}'. That is Ray Serve's name: .*{text}"
    with pytest.raises(TypeError, match=match):
        getattr(serve, function)(None, **{name: {}})


def test_arguments_of_ray_serve_that_are_none_are_left_out() -> None:
    with pytest.raises(TypeError, match=r"serve.run\(\) takes what .bind\(\) returns"):
        serve.run(3, logging_config=None, controller_options=None, local=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no argument 'grpc_options'"):
        serve.run(3, logging_config=None, grpc_options={})  # type: ignore[call-arg]


def test_awaitable_forms_name_themselves_in_errors() -> None:
    with pytest.raises(TypeError, match=r"serve.run_async\(\) has no argument 'grpc_options'"):
        asyncio.run(serve.run_async(None, grpc_options={}))  # type: ignore[call-arg]


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        serve.run(None, nonsense=1)  # type: ignore[call-arg]


@each_case(
    ("function", "args", "kwargs", "text"),
    [
        ("connect", (1, 2, 3), {}, "too many positional arguments. Its arguments are: dask_client, address."),
        ("run", (), {}, "missing a required argument: 'target'. Its arguments are: target, blocking"),
        ("start", (), {"prt": 1}, "got an unexpected keyword argument 'prt'. Its arguments are: detached"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_function_and_its_arguments(
    function: str, args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=rf"^serve.{function}\(\): {text}"):
        getattr(serve, function)(*args, **kwargs)
