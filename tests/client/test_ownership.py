"""An instance ends with the client that started it, unless this client was never used."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import daskserve as serve
from daskserve.client.client import Client
from daskserve.client.functions.local import LocalInstance
from daskserve.client.instance.connection import InstanceConnection


@pytest.fixture
def thread() -> Iterator[LocalInstance]:
    """The thread of an instance, which ends with the instance."""
    found = LocalInstance()
    assert found.started().is_owner
    yield found
    serve.shutdown()
    assert not found.is_alive()


def taken_client(thread: LocalInstance) -> Client:
    """Return the only client of an instance; nothing else refers to the instance's owner."""
    assert thread.connection is not None
    client = Client(thread.connection)
    thread.connection = None
    return client


def test_an_instance_ends_with_a_client_that_was_used(thread: LocalInstance) -> None:
    client = taken_client(thread)
    assert client.list_backends() == {}
    del client
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_instance_whose_client_was_never_used_stays_for_the_functions_of_the_module(
    thread: LocalInstance,
) -> None:
    client = taken_client(thread)
    connection, instance = client._connection.cluster_connection, client.instance_name
    del client
    gc.collect()
    kept = connection.default_instance
    assert isinstance(kept, InstanceConnection)
    assert kept.is_owner
    assert Client(kept).list_backends() == {}
    assert kept.instance == instance
    Client(kept).shutdown()
    thread.join(10)
    assert not thread.is_alive()


def test_an_unused_second_instance_ends_with_its_client(thread: LocalInstance) -> None:
    client = taken_client(thread)
    other = InstanceConnection(client._connection.cluster_connection, "other")
    other.become_default()
    del client
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
