"""Handles as clients return them: cached, of endpoints with any name, with the body by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from daskserve.client.client import Client
from daskserve.client.connection import InstanceConnection
from daskserve.errors import ClosedError, NotFoundError
from daskserve.testing import local_instance


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
    """The verbs that the controller was asked for."""
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


def test_clients_of_an_instance_share_cached_handles(client: Client) -> None:
    client.create_endpoint("shared", backend="echo")
    other = Client(InstanceConnection(client._connection.link, client.instance_name))
    assert client.get_handle("shared") is other.get_handle("shared")


def test_a_handle_of_a_missing_endpoint_is_not_cached(client: Client) -> None:
    missing = client.get_handle("later", missing_ok=True)
    client.create_endpoint("later", backend="echo")
    assert client.get_handle("later") is not missing
    assert client.get_handle("later") is client.get_handle("later")
    assert missing.remote(1).result() == [1, {}]


def test_a_new_version_with_other_methods_has_another_handle(client: Client) -> None:
    client.deploy("versions", Old)
    assert client.get_handle("versions").first.remote().result() == 1
    client.deploy("versions", New)
    assert client.get_handle("versions").second.remote().result() == 2


def test_a_closed_client_returns_no_cached_handle(client: Client) -> None:
    client.create_endpoint("closed", backend="echo")
    other = Client(InstanceConnection(client._connection.link, client.instance_name))
    assert other.get_handle("closed") is other.get_handle("closed")
    other.disconnect()
    with pytest.raises(ClosedError):
        other.get_handle("closed")


def test_the_body_can_be_given_by_name(client: Client) -> None:
    client.create_endpoint("body", backend="echo")
    handle = client.get_handle("body")
    assert handle.remote(data={"x": 1}, k=2).result() == [{"x": 1}, {"k": 2}]
    assert handle.remote(data=None).result() == [None, {}]
    with pytest.raises(TypeError, match="multiple values for argument 'data'"):
        handle.remote(1, data=2).result()
