"""Handles that clients return: they are cached, accept endpoints of any name, and take the body by name."""

from __future__ import annotations

import asyncio
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from daskserve.client.client import Client
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.instance.known_handles import SWEPT
from daskserve.data.caller.routing.waiting_calls import waiting_calls_of
from daskserve.errors import ClosedError, NotFoundError, ServeError
from daskserve.testing import local_instance, local_instance_async


class Old:
    def first(self) -> int:
        return 1

    def __call__(self, request: Any) -> Any: ...


class New:
    def second(self) -> int:
        return 2

    def __call__(self, request: Any) -> Any: ...


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_instance() as client:
        client.create_backend("echo", lambda request: [request.data, dict(request.query_params)])
        yield client


@pytest.fixture
def calls(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs that were called at the controller."""
    found: list[str] = []
    call = client._connection.calls.call

    async def count(verb: str, **message: Any) -> Any:
        found.append(verb)
        return await call(verb, **message)

    monkeypatch.setattr(client._connection.calls, "call", count)
    return found


def test_a_handle_is_cached_until_its_endpoint_changes(client: Client, calls: list[str]) -> None:
    client.create_endpoint("cached", backend="echo")
    calls.clear()
    handle = client.get_handle("cached")
    assert client.get_handle("cached") is handle
    assert client.get_handle("cached", missing_ok=True) is handle
    assert calls == ["get_endpoint"]
    client.delete_endpoint("cached")
    with pytest.raises(NotFoundError):
        client.get_handle("cached")
    client.create_endpoint("cached", backend="echo")
    assert client.get_handle("cached") is not handle
    assert client.get_handle("cached").remote(1).result() == [1, {}]


def test_a_program_does_not_keep_the_handles_of_deleted_endpoints(client: Client) -> None:
    handles = []
    for number in range(2 * SWEPT):
        client.create_endpoint(f"gone{number}", backend="echo")
        handles.append(weakref.ref(client.get_handle(f"gone{number}")))
        client.delete_endpoint(f"gone{number}")
    gc.collect()
    assert sum(each() is not None for each in handles) <= SWEPT


def test_clients_of_an_instance_share_cached_handles(client: Client) -> None:
    client.create_endpoint("shared", backend="echo")
    other = Client(InstanceConnection(client._connection.cluster_connection, client.instance_name))
    assert client.get_handle("shared") is other.get_handle("shared")


def test_a_handle_of_a_missing_endpoint_is_not_cached(client: Client) -> None:
    missing = client.get_handle("later", missing_ok=True)
    client.create_endpoint("later", backend="echo")
    assert client.get_handle("later") is not missing
    assert client.get_handle("later") is client.get_handle("later")
    assert missing.remote(1).result() == [1, {}]


def test_a_client_cannot_be_pickled(client: Client) -> None:
    with pytest.raises(ServeError, match="client cannot be serialized"):
        pickle.dumps(client)


def test_a_new_version_with_other_methods_has_another_handle(client: Client) -> None:
    client.deploy("versions", Old)
    assert client.get_handle("versions").first.remote().result() == 1
    client.deploy("versions", New)
    assert client.get_handle("versions").second.remote().result() == 2


def test_a_closed_client_returns_no_cached_handle(client: Client) -> None:
    client.create_endpoint("closed", backend="echo")
    other = Client(InstanceConnection(client._connection.cluster_connection, client.instance_name))
    assert other.get_handle("closed") is other.get_handle("closed")
    other.disconnect()
    with pytest.raises(ClosedError):
        other.get_handle("closed")


def test_all_keywords_are_query_parameters_and_one_may_be_the_body(client: Client) -> None:
    client.create_endpoint("body", backend="echo")
    handle = client.get_handle("body")
    assert handle.remote(data={"x": 1}, k=2).result() == [{"x": 1}, {"data": {"x": 1}, "k": 2}]
    assert handle.remote(1, data=2).result() == [1, {"data": 2}]
    with pytest.raises(TypeError, match="takes one positional argument, the body, and got 2"):
        handle.remote(1, 2).result()


@pytest.mark.parametrize("what", ["deployment", "endpoint", "backend", "application", "instance"])
def test_a_deletion_waits_for_calls_that_learn_where_to_go(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with local_instance_async() as client:
            connection = client._connection
            calls: list[str] = []
            monkeypatch.setattr(connection.calls, "call", _noting(calls, connection.calls.call))
            monkeypatch.setattr(
                connection.cluster_connection, "ask", _noting(calls, connection.cluster_connection.ask)
            )
            delete = client.shutdown if what == "instance" else getattr(client, f"delete_{what}")
            with waiting_calls_of(connection.cluster_connection.cluster(client.instance_name)):
                deleting = asyncio.create_task(delete(*([] if what == "instance" else ["name"])))
                await asyncio.sleep(0.02)
                assert calls == []
            await deleting
            assert calls[0] in (f"delete_{what}", "drain_instance")

    asyncio.run(main())


def _noting(calls: list[str], call: Any) -> Any:
    async def note(verb: str, **message: Any) -> Any:
        calls.append(verb)
        return await call(verb, **message)

    return note
