"""Endpoints: the changes of the verbs, and the text of every refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from control_harness import backend, endpoint, state_of
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.control.decisions.endpoints import (
    check_weights,
    create_endpoint,
    delete_endpoint,
    deploy_endpoint,
    normalise_route,
    published,
    published_routes,
    set_traffic,
    shadow_traffic,
)
from daskserve.control.records.records import Change, EndpointRecord
from daskserve.control.records.state import State
from daskserve.errors import AlreadyRegisteredError, BadRequestError, NotRegisteredError


def create(state: State, name: str = "e", **fields: Any) -> Change:
    defaults: dict[str, Any] = {"route": "/e", "methods": ["GET"], "backend": "b", "request_id": "r1"}
    return create_endpoint(state, name, **{**defaults, **fields})


def only(change: Change) -> EndpointRecord:
    (record,) = change.values()
    assert isinstance(record, EndpointRecord)
    assert list(change) == [record.key]
    return record


# ---- create


def test_an_endpoint_begins_with_all_traffic_on_its_backend() -> None:
    record = only(create(state_of(backend())))
    assert record == EndpointRecord("e", "/e", ("GET",), {"b": 1.0}, {}, request_id="r1")


def test_methods_are_upper_case_each_once() -> None:
    assert only(create(state_of(backend()), methods=["post", "GET", "Post"])).methods == ("GET", "POST")


@each_case(("given_", "kept"), [("/e/", "/e"), ("/e//", "/e"), ("/", "/"), ("/a/b", "/a/b")])
def test_a_route_loses_its_trailing_slashes(given_: str, kept: str) -> None:
    assert normalise_route(given_) == kept
    assert only(create(state_of(backend()), route=given_)).route == kept


def test_a_retried_call_changes_nothing() -> None:
    state = state_of(backend())
    state.apply(create(state))
    assert create(state) == {}
    assert create(state, route="/other", methods=["POST"]) == {}


def test_creating_the_same_endpoint_again_points_to_set_traffic() -> None:
    state = state_of(backend(), endpoint())
    with pytest.raises(
        AlreadyRegisteredError, match=r"^Route '/e' is already registered to endpoint 'e'.*"
    ) as info:
        create(state)
    assert "use serve.set_traffic()" in str(info.value)
    with pytest.raises(AlreadyRegisteredError, match=r"serve\.set_traffic\(\)"):
        create(state, methods=["get"], route="/e/")


def test_a_route_in_use_is_rejected() -> None:
    state = state_of(backend(), endpoint("other", "/e"))
    with pytest.raises(
        AlreadyRegisteredError, match=r"^Cannot create endpoint\. Route '/e' is already registered\."
    ):
        create(state)


def test_a_route_that_matches_the_same_paths_as_another_is_rejected() -> None:
    state = state_of(backend(), backend("new"), endpoint("other", "/a/{x}"))
    with pytest.raises(AlreadyRegisteredError, match=r"Route '/a/\{y:str\}' matches the paths of '/a/\{x\}'"):
        create(state, route="/a/{y:str}")
    with pytest.raises(AlreadyRegisteredError, match=r"'other' is registered there, as '/a/\{x\}'\."):
        deploy_endpoint(state, "new", route="/a/{y}", methods=["GET"], python_methods=[])
    for free in ("/a/{y:int}", "/a/x", "/a/{x}/b", "/{x}"):
        assert only(create(state, route=free)).route == free
    # A deployment may rename the variable of its own route.
    mine = state_of(backend("d"), endpoint("d", "/a/{x}", is_legacy=False))
    assert (
        only(deploy_endpoint(mine, "d", route="/a/{y}", methods=["GET"], python_methods=[])).route == "/a/{y}"
    )


@each_case("change", [{"route": "/f"}, {"route": None}, {"methods": ["POST"]}])
def test_a_name_in_use_is_rejected(change: dict[str, Any]) -> None:
    state = state_of(backend(), endpoint())
    with pytest.raises(
        AlreadyRegisteredError, match=r"^Cannot create endpoint\. Endpoint 'e' is already registered\."
    ):
        create(state, **change)


@each_case("records", [[], [backend(is_deleting=True)]])
def test_an_unregistered_backend_is_rejected(records: Sequence[Any]) -> None:
    words = r"^Attempted to assign traffic to a backend 'b' that is not registered\.$"
    with pytest.raises(NotRegisteredError, match=words):
        create(state_of(*records))


def test_all_rejections_are_value_errors() -> None:
    assert issubclass(AlreadyRegisteredError, ValueError)
    assert issubclass(NotRegisteredError, ValueError)


def test_endpoints_without_a_route_are_in_no_table_and_do_not_collide() -> None:
    state = state_of(backend())
    state.apply(create(state, "e", route=None))
    state.apply(create(state, "f", route=None, request_id="r2"))
    assert published_routes(state) == {}
    assert set(state.endpoints) == {"e", "f"}


# ---- delete


def test_deleting_leaves_the_backend_and_frees_name_and_route() -> None:
    state = state_of(backend(), endpoint())
    state.apply(delete_endpoint(state, "e"))
    assert list(state.backends) == ["b"]
    assert published_routes(state) == {}
    assert only(create(state)).route == "/e"


def test_deleting_an_unknown_endpoint_changes_nothing() -> None:
    assert delete_endpoint(State(), "e") == {}


# ---- traffic


def test_traffic_is_replaced_as_a_whole() -> None:
    state = state_of(backend("b"), backend("c"), backend("d"), endpoint(traffic={"b": 0.5, "c": 0.5}))
    record = only(set_traffic(state, "e", {"d": 1, "b": 0}))
    assert record.traffic == {"d": 1.0, "b": 0.0}
    assert record.shadows == {}


def test_the_same_traffic_changes_nothing() -> None:
    assert set_traffic(state_of(backend(), endpoint()), "e", {"b": 1}) == {}


@each_case(
    "weights",
    [
        {},
        {"b": 0.5},
        {"b": 1.5},
        {"b": -0.5, "c": 1.5},
        {"b": 0.5, "c": 0.6},
        {"b": float("nan")},
        {"b": float("inf")},
        {"b": "1"},
        {"b": None},
        {"b": True},
    ],
)
def test_weights_must_be_in_0_to_1_and_sum_to_1(weights: dict[str, Any]) -> None:
    state = state_of(backend("b"), backend("c"), endpoint())
    with pytest.raises(BadRequestError, match=r"must (sum to 1|be in 0\.\.1)"):
        set_traffic(state, "e", weights)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_rounded_weights_still_sum_to_1(parts: list[int]) -> None:
    check_weights({str(n): part / sum(parts) for n, part in enumerate(parts)})


def test_traffic_of_an_unknown_endpoint_lists_the_registered_ones() -> None:
    state = state_of(backend(), endpoint())
    with pytest.raises(NotRegisteredError, match="Endpoint 'x' is not registered; registered: e"):
        set_traffic(state, "x", {"b": 1})
    with pytest.raises(NotRegisteredError, match="registered: none"):
        set_traffic(State(), "x", {"b": 1})


def test_traffic_to_an_unknown_backend_is_refused_even_without_weight() -> None:
    state = state_of(backend(), endpoint())
    words = r"^Attempted to assign traffic to a backend 'x' that is not registered\.$"
    with pytest.raises(NotRegisteredError, match=words):
        set_traffic(state, "e", {"b": 1, "x": 0})


# ---- shadows


def test_shadows_are_set_one_by_one_and_zero_removes_one() -> None:
    state = state_of(backend("b"), backend("c"), backend("d"), endpoint())
    state.apply(shadow_traffic(state, "e", "c", 0.25))
    state.apply(shadow_traffic(state, "e", "d", 1))
    assert state.endpoints["e"].shadows == {"c": 0.25, "d": 1.0}
    state.apply(shadow_traffic(state, "e", "c", 0))
    assert state.endpoints["e"].shadows == {"d": 1.0}
    assert state.endpoints["e"].traffic == {"b": 1.0}


def test_the_same_shadow_changes_nothing() -> None:
    state = state_of(backend("b"), backend("c"), endpoint(shadows={"c": 0.25}))
    assert shadow_traffic(state, "e", "c", 0.25) == {}
    assert shadow_traffic(state, "e", "b", 0) == {}


def test_shadows_of_unknown_endpoints_or_backends_are_rejected() -> None:
    state = state_of(backend(), endpoint())
    with pytest.raises(NotRegisteredError, match="'x' that is not registered"):
        shadow_traffic(state, "e", "x", 0.5)
    with pytest.raises(NotRegisteredError, match="Endpoint 'x' is not registered"):
        shadow_traffic(state, "x", "b", 0.5)


# ---- deployments


def deploy(state: State, name: str = "d", route: str | None = "/d") -> Change:
    return deploy_endpoint(state, name, route=route, methods=["POST", "GET"], python_methods=["f"])


def test_a_deployment_gets_an_endpoint_of_its_name() -> None:
    record = only(deploy(State()))
    assert record == EndpointRecord(
        "d", "/d", ("GET", "POST"), {"d": 1.0}, {}, is_legacy=False, python_methods=("f",)
    )


def test_deploying_again_changes_nothing_and_another_route_changes_the_route() -> None:
    state = State()
    state.apply(deploy(state))
    assert deploy(state) == {}
    assert only(deploy(state, route="/x/")).route == "/x"


def test_deploying_again_keeps_the_shadows() -> None:
    state = state_of(endpoint("d", "/d", is_legacy=False, shadows={"s": 0.5}))
    assert only(deploy(state)).shadows == {"s": 0.5}


def test_a_deployment_cannot_take_anothers_route_or_a_classic_endpoints_name() -> None:
    with pytest.raises(AlreadyRegisteredError, match="endpoint 'e' is registered there"):
        deploy(state_of(endpoint("e", "/d")))
    with pytest.raises(AlreadyRegisteredError, match="a classic endpoint of that name"):
        deploy(state_of(endpoint("d", "/d")))


# ---- what others learn


def test_the_values_published_to_routers_and_proxies() -> None:
    record = endpoint(methods=("GET", "POST"), shadows={"s": 0.5}, python_methods=("f",), is_legacy=False)
    assert published(record) == {
        "traffic": {"b": 1.0},
        "shadows": {"s": 0.5},
        "legacy": False,
        "python_methods": ["f"],
        "route": "/e",
    }
    assert published(None) is None
    state = state_of(record, endpoint("headless", None))
    assert published_routes(state) == {"/e": {"endpoint": "e", "methods": ["GET", "POST"]}}
