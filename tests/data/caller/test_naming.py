"""Errors of calls name two deployments: the called deployment, and the deployment that called it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import daskserve as serve
from daskserve.client.client import Client
from daskserve.data.caller.calls.naming import with_called, with_caller
from daskserve.errors import ActorLostError, ReplicaBusyError, RequestTimeoutError
from daskserve.payload.packed_errors import pack_now
from daskserve.testing import local_instance


@serve.deployment
class Last:
    async def __call__(self) -> None:
        await asyncio.sleep(3600)

    async def lost(self) -> None:
        raise ActorLostError("The connection to tcp://10.0.0.1:1 was lost.")

    def double(self, number: int) -> int:
        return 2 * number


@serve.deployment
class Middle:
    def __init__(self, last: serve.Handle) -> None:
        self.last = last

    async def __call__(self) -> None:
        await self.last.options(timeout_s=0.05).remote()

    def plain(self) -> None:
        self.last.options(timeout_s=0.05).remote().result()

    async def stream(self) -> AsyncIterator[Any]:
        yield 1
        yield self.last.double.remote(self.last.double.remote(2))
        async for each in self.last.options(timeout_s=0.05, stream=True).remote():
            yield each

    def plain_stream(self) -> Iterator[Any]:
        yield self.last.double.remote(self.last.double.remote(2))


@serve.deployment
class First:
    def __init__(self, middle: serve.Handle) -> None:
        self.middle = middle

    async def __call__(self, method: str = "__call__") -> None:
        await self.middle.options(method_name=method).remote()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_instance(workers=2) as client:
        client.run(First.bind(Middle.bind(Last.bind())), name="chain", route_prefix=None)
        yield client


LATE = (
    r"^A call from deployment 'Middle' of application 'chain' to deployment 'Last' of application 'chain' "
    r"failed: Request .* was not answered before its deadline\.$"
)


@pytest.mark.parametrize("method", ["__call__", "plain"])
def test_the_error_of_a_chain_names_the_caller_and_the_called(client: Client, method: str) -> None:
    with pytest.raises(RequestTimeoutError, match=LATE):
        client.get_app_handle("chain").remote(method).result(10)


def test_the_error_of_a_stream_names_them_and_its_items_may_be_responses(client: Client) -> None:
    handle = client.get_deployment_handle("Middle", "chain").options(stream=True)
    stream = handle.stream.remote()
    assert [next(stream), next(stream)] == [1, 8]
    with pytest.raises(RequestTimeoutError, match=LATE):
        next(stream)
    assert list(handle.plain_stream.remote()) == [8]


def test_a_program_is_no_deployment(client: Client) -> None:
    with pytest.raises(
        RequestTimeoutError, match=r"^A call to deployment 'Last' of application 'chain' failed"
    ):
        client.get_deployment_handle("Last", "chain").options(timeout_s=0.05).remote().result(10)


def test_a_lost_connection_has_the_names_and_keeps_what_is_known_of_it() -> None:
    shared = ActorLostError("The connection to tcp://10.0.0.1:1 was lost.", begun=True, is_disconnected=True)
    shared.__cause__ = ConnectionResetError("by the peer")
    called = with_called(shared, "app/model", is_legacy=False)
    text = f"A call to deployment 'model' of application 'app' failed: {shared}"
    assert (str(called), called.is_disconnected, called.__cause__) == (text, True, shared.__cause__)
    assert str(shared) == "The connection to tcp://10.0.0.1:1 was lost."
    assert with_called(called, "other", is_legacy=True) is called
    assert with_caller(called) is called  # no replica reads it
    assert str(with_called(shared, "old", is_legacy=True)).startswith("A call to endpoint 'old' failed: The")
    others = [ReplicaBusyError("full"), ValueError("of user code")]
    assert [with_called(each, "e", is_legacy=True) for each in others] == others


def test_an_error_with_both_names_is_passed_on_as_it_is() -> None:
    whole = ActorLostError("A call from deployment 'a' to deployment 'b' failed: It was lost.", begun=False)
    passed = pack_now(whole)
    assert passed is not None
    error = passed.load()
    assert (str(error), error.begun) == (str(whole), True)  # type: ignore[attr-defined]


def test_a_handle_has_the_names(client: Client) -> None:
    handle = client.get_deployment_handle("Last", "chain")
    assert (handle.deployment_name, handle.app_name) == ("Last", "chain")
    assert handle.double.options(timeout_s=1).deployment_name == "Last"
    client.create_backend("b", len)
    client.create_endpoint("a/b", backend="b")
    assert client.get_handle("a/b").deployment_name == "a/b"
