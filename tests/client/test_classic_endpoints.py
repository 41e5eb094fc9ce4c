"""Endpoints in the classic API: routes, methods, traffic, answers (rows CL10-CL17, CL27, CL37, CL38)."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from dask_processes import fetch, poll_for

import daskserve as serve


@pytest.fixture
def backends(client: serve.Client) -> serve.Client:
    """Return a client with the backends ``a`` and ``b``, which answer with their names."""
    client.create_backend("a", lambda request: "a")
    client.create_backend("b", lambda request: "b")
    return client


def test_a_route_answers_once_the_call_returns(backends: serve.Client, url: str) -> None:
    """CL10, CL14: no wait is needed, and the backend gets all traffic."""
    for number in range(20):
        backends.create_endpoint(f"e{number}", backend="a", route=f"/e{number}")
        reply = fetch(f"{url}/e{number}")
        assert (reply.status, reply.text) == (200, "a")
    assert fetch(f"{url}/-/routes").json == {f"/e{number}": f"e{number}" for number in range(20)}
    assert backends.list_endpoints()["e0"]["traffic"] == {"a": 1.0}


def test_wrong_argument_types_are_refused(backends: serve.Client) -> None:
    """CL11: each raises a TypeError that names the argument, before any request to the cluster."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "backend"),
        ({"backend": 1}, "backend"),
        ({"backend": "a", "route": 5}, "route"),
        ({"backend": "a", "route": "no-slash"}, "route"),
        ({"backend": "a", "methods": "GET"}, "methods"),
        ({"backend": "a", "methods": ["GET", 1]}, "methods"),
    ]
    for arguments, named in cases:
        with pytest.raises(TypeError, match=named):
            backends.create_endpoint("bad", **arguments)


def test_duplicate_endpoints_and_routes_are_refused(backends: serve.Client, url: str) -> None:
    """CL12: the same endpoint, a taken route, a taken name; existing endpoints are unchanged."""
    backends.create_endpoint("first", backend="a", route="/first", methods=["GET", "POST"])
    before = backends.list_endpoints()
    with pytest.raises(
        ValueError, match=r"^Route '/first' is already registered.*use serve\.set_traffic\(\)"
    ):
        backends.create_endpoint("first", backend="b", route="/first", methods=["get", "POST"])
    with pytest.raises(ValueError, match=r"^Cannot create endpoint\. Route '/first' is already registered\."):
        backends.create_endpoint("second", backend="b", route="/first")
    with pytest.raises(
        ValueError, match=r"^Cannot create endpoint\. Endpoint 'first' is already registered\."
    ):
        backends.create_endpoint("first", backend="b", route="/other")
    assert backends.list_endpoints() == before
    assert fetch(f"{url}/first").text == "a"


def test_an_unknown_backend_is_refused(backends: serve.Client) -> None:
    """CL13: for new endpoints and for traffic; nothing is created or changed."""
    message = r"^Attempted to assign traffic to a backend 'x' that is not registered\."
    with pytest.raises(ValueError, match=message):
        backends.create_endpoint("new", backend="x", route="/new")
    assert backends.list_endpoints() == {}
    backends.create_endpoint("new", backend="a", route="/new")
    with pytest.raises(ValueError, match=message):
        backends.set_traffic("new", {"a": 0.5, "x": 0.5})
    assert backends.list_endpoints()["new"]["traffic"] == {"a": 1.0}


def test_an_endpoint_without_a_route_is_reached_by_handle_only(backends: serve.Client, url: str) -> None:
    """CL15."""
    backends.create_endpoint("headless", backend="a")
    assert fetch(f"{url}/-/routes").json == {}
    assert fetch(f"{url}/headless").status == 404
    assert backends.get_handle("headless").remote().result() == "a"
    assert backends.list_endpoints()["headless"]["route"] is None


def test_delete_endpoint(backends: serve.Client, url: str) -> None:
    """CL16: it is idempotent, backends stay, the URL is gone at once, and the name can be reused."""
    backends.create_endpoint("e", backend="a", route="/e")
    handle = backends.get_handle("e")
    assert fetch(f"{url}/e").status == 200
    known = backends.list_backends()
    backends.delete_endpoint("e")
    assert fetch(f"{url}/e").status == 404
    with pytest.raises(KeyError, match="Endpoint 'e' does not exist"):
        handle.remote().result(5)
    backends.delete_endpoint("e")
    backends.delete_endpoint("never there")
    assert backends.list_backends() == known
    assert backends.list_endpoints() == {}
    backends.create_endpoint("e", backend="b", route="/elsewhere")
    assert fetch(f"{url}/elsewhere").text == "b"
    assert handle.remote().result() == "b"


def test_list_endpoints(backends: serve.Client) -> None:
    """CL17: exactly these keys."""
    backends.create_endpoint("e", backend="a", route="/e", methods=["POST", "get"])
    backends.set_traffic("e", {"a": 0.25, "b": 0.75})
    backends.shadow_traffic("e", "b", 0.5)
    assert backends.list_endpoints() == {
        "e": {
            "route": "/e",
            "methods": ["GET", "POST"],
            "traffic": {"a": 0.25, "b": 0.75},
            "shadows": {"b": 0.5},
            "python_methods": [],
        }
    }


def test_traffic_is_split_by_weight(backends: serve.Client) -> None:
    """CL27: 1000 calls split .8/.2 within 3 sigma; a weight of 0 gets no calls."""
    backends.create_endpoint("split", backend="a")
    handle = backends.get_handle("split")

    async def draw(calls: int) -> Counter[str]:
        # As many concurrent calls as the replicas run, so that no call is queued.
        found: Counter[str] = Counter()
        for _ in range(0, calls, 50):
            found.update(await asyncio.gather(*(handle.remote() for _ in range(50))))
        return found

    def is_within_3_sigma() -> bool:
        found = asyncio.run(draw(1000))
        assert found["a"] + found["b"] == 1000
        return abs(found["b"] - 200) <= 3 * sqrt(1000 * 0.8 * 0.2)

    backends.set_traffic("split", {"a": 0.8, "b": 0.2})
    # A fair draw exceeds 3 sigma once in 370 times, but hardly twice in a row.
    assert is_within_3_sigma() or is_within_3_sigma()
    backends.set_traffic("split", {"a": 0.0, "b": 1.0})
    assert asyncio.run(draw(100)) == {"b": 100}


def test_a_traffic_change_applies_at_once(backends: serve.Client, url: str) -> None:
    """CL27: no request after the call uses the old policy, over HTTP or by handle."""
    backends.create_endpoint("e", backend="a", route="/e")
    handle = backends.get_handle("e")
    for tag in "baba":
        backends.set_traffic("e", {tag: 1.0})
        assert fetch(f"{url}/e").text == tag
        assert handle.remote().result() == tag


def test_an_invalid_traffic_policy_is_refused(backends: serve.Client) -> None:
    """CL27: ValueErrors for other types than dicts, weights outside 0..1 and wrong sums; nothing changes."""
    backends.create_endpoint("e", backend="a")
    wrong: list[Any] = [{"a": 0.5, "b": 0.6}, {"a": 0.5}, {}, {"a": 1.5, "b": -0.5}, {"a": "1"}, {"a": True}]
    for policy in [*wrong, [("a", 1)], None]:
        with pytest.raises(ValueError, match=r"[Tt]raffic"):
            backends.set_traffic("e", policy)
    assert backends.list_endpoints()["e"]["traffic"] == {"a": 1.0}


def test_setting_traffic_of_an_unknown_endpoint_is_refused(backends: serve.Client) -> None:
    """CL27"""
    with pytest.raises(ValueError, match="Endpoint 'unknown' is not registered"):
        backends.set_traffic("unknown", {"a": 1.0})


def test_shadow_requests_do_not_affect_callers(backends: serve.Client, url: str, tmp_path: Path) -> None:
    """A shadow backend gets copies and may fail; callers get the answer of the main backend."""
    log = tmp_path / "copies"

    class Failing:
        def __call__(self, request: Any) -> None:
            with log.open("a") as file:
                file.write(request.query_params["n"] + "\n")
            raise RuntimeError("an error of a shadow")

    backends.create_backend("failing", Failing)
    backends.create_endpoint("e", backend="a", route="/e")
    backends.shadow_traffic("e", "failing", 1.0)
    assert [fetch(f"{url}/e?n={number}").text for number in range(5)] == ["a"] * 5
    poll_for(lambda: log.exists() and sorted(log.read_text().split()) == list("01234"))
    backends.shadow_traffic("e", "failing", 0)
    assert backends.list_endpoints()["e"]["shadows"] == {}
    for bad in (2, -0.1, "0.5", True):
        with pytest.raises(TypeError, match="proportion"):
            backends.shadow_traffic("e", "failing", bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend 'unknown' that is not registered"):
        backends.shadow_traffic("e", "unknown", 0.5)


def test_a_method_that_is_not_allowed_gets_405(backends: serve.Client, url: str) -> None:
    """CL37: the 405 names the allowed methods; the default is GET only."""
    backends.create_endpoint("get", backend="a", route="/get")
    backends.create_endpoint("two", backend="a", route="/two", methods=["POST", "PUT"])
    reply = fetch(f"{url}/get", "POST", body=b"x")
    assert reply.status == 405
    assert reply.text == "Methods POST not allowed. Available HTTP methods are ['GET']."
    reply = fetch(f"{url}/two")
    assert (reply.status, reply.headers["allow"]) == (405, "POST, PUT")
    assert fetch(f"{url}/two", "PUT", body=b"x").text == "a"
