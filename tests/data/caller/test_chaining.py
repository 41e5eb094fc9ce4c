"""Responses as arguments of other calls."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dask import delayed
from starlette.requests import ClientDisconnect, Request

import daskserve as serve
from daskserve.client.client import Client
from daskserve.common.types import KEPT_BYTES, KeptPayload
from daskserve.errors import PassedResponseError, RemoteTraceback, RequestCancelledError, UnavailableError
from daskserve.testing import local_instance

LARGE = 2 * KEPT_BYTES
DEADLINE_S = 20.0


class CannotLoad:
    """Cannot be unpickled in the thread of the test, which acts as the caller."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _load, (self.number,)


def _load(number: int) -> CannotLoad:
    assert threading.current_thread() is not threading.main_thread(), "the caller read the value"
    return CannotLoad(number)


class First:
    def __init__(self) -> None:
        self.gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def __call__(self, size: int) -> np.ndarray[Any, Any]:
        return np.ones(size, dtype=np.uint8)

    def object(self) -> CannotLoad:
        return CannotLoad(7)

    def fail(self) -> None:
        raise KeyError("no such thing")

    def gated(self, name: str) -> int:
        assert self.gates[name].wait(DEADLINE_S)
        return 5

    def open(self, name: str) -> None:
        self.gates[name].set()

    def numbers(self) -> Iterator[int]:
        yield from range(3)


class Reader:
    def __call__(self, request: Any, more: int = 0) -> list[Any]:
        return [request.method, request.body().decode(), more]


class Second:
    def __call__(self, value: Any, more: int = 0) -> int:
        return int(np.sum(value)) + more

    def number(self, value: CannotLoad) -> int:
        return value.number

    def same(self, one: Any, values: dict[str, list[Any]]) -> bool:
        return all(each is one for each in values["all"])

    async def add(self, one: int, other: int = 0) -> int:
        return one + other

    def doubled(self, value: int) -> Iterator[int]:
        yield from (value, 2 * value)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_instance(workers=2) as client:
        client.deploy("first", First, config={"max_concurrent_queries": 4})
        client.deploy("second", Second, config={"max_concurrent_queries": 1})
        client.deploy("reader", Reader)
        yield client


@pytest.fixture
def first(client: Client) -> serve.Handle:
    return client.get_handle("first")


@pytest.fixture
def second(client: Client) -> serve.Handle:
    return client.get_handle("second")


@pytest.mark.parametrize("by_reference", [True, False])
@pytest.mark.parametrize("size", [10, LARGE])
def test_a_response_stands_for_its_result(
    first: serve.Handle, second: serve.Handle, size: int, by_reference: bool
) -> None:
    handle = second.options(_by_reference=by_reference)
    assert handle.remote(first.remote(size), more=1).result(DEADLINE_S) == size + 1
    assert handle.remote(value=first.remote(size)).result(DEADLINE_S) == size


def test_the_caller_never_reads_the_value(first: serve.Handle, second: serve.Handle) -> None:
    assert second.number.remote(first.object.remote()).result(DEADLINE_S) == 7


def test_a_large_result_does_not_reach_the_caller_unless_it_asks(
    first: serve.Handle, second: serve.Handle
) -> None:
    between = first.remote(LARGE)
    assert second.remote(between).result(DEADLINE_S) == LARGE
    assert isinstance(between._future.result(), KeptPayload)
    assert between.result(DEADLINE_S).nbytes == LARGE
    assert second.remote(between).result(DEADLINE_S) == LARGE  # now from the caller


async def test_a_large_result_can_be_awaited_after_it_was_passed_on(
    first: serve.Handle, second: serve.Handle
) -> None:
    between = first.remote(LARGE)
    total = second.remote(between)
    assert (await between).nbytes == LARGE
    assert await total == LARGE


def test_responses_deep_in_the_arguments_are_the_same_object(
    first: serve.Handle, second: serve.Handle
) -> None:
    for size in (10, LARGE):
        one = first.remote(size)
        assert second.same.remote(one, {"all": [one, one]}).result(DEADLINE_S)


def test_chains_of_any_length_hold_no_slot_while_they_wait(first: serve.Handle, second: serve.Handle) -> None:
    """The second deployment runs one request at a time, and each request's argument is a call to it."""
    response = first.gated.remote("6")
    for _ in range(5):
        response = second.add.remote(response, other=1)
    assert second.add.remote(1).result(DEADLINE_S) == 1
    first.open.remote("6").result(DEADLINE_S)
    assert response.result(DEADLINE_S) == 10


def test_an_error_upstream_keeps_its_type(first: serve.Handle, second: serve.Handle) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        second.remote(second.remote(first.fail.remote())).result(DEADLINE_S)
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def test_the_first_error_ends_the_call_though_others_are_pending(
    first: serve.Handle, second: serve.Handle
) -> None:
    waiting = first.gated.remote("8")
    with pytest.raises(KeyError):
        second.add.remote(waiting, first.fail.remote()).result(DEADLINE_S)
    first.open.remote("8").result(DEADLINE_S)
    assert waiting.result(DEADLINE_S) == 5


def test_a_cancelled_response_cancels_what_depends_on_it(first: serve.Handle, second: serve.Handle) -> None:
    upstream = first.gated.remote("9")
    response = second.add.remote(upstream)
    upstream.cancel()
    with pytest.raises(RequestCancelledError, match=upstream.request_id):
        response.result(DEADLINE_S)
    first.open.remote("9").result(DEADLINE_S)


def test_dask_values_may_stand_beside_responses(first: serve.Handle, second: serve.Handle) -> None:
    assert second.add.remote(delayed(int)("3"), second.add.remote(4)).result(DEADLINE_S) == 7


def test_a_stream_may_depend_on_a_response_but_is_none(first: serve.Handle, second: serve.Handle) -> None:
    handle = second.options(method_name="doubled", stream=True)
    assert list(handle.remote(second.add.remote(4))) == [4, 8]
    with pytest.raises(RuntimeError, match="belongs to the code that made the call"):
        second.remote(first.options(method_name="numbers", stream=True).remote())


def test_a_response_cannot_be_pickled_for_anything_else(first: serve.Handle) -> None:
    response = first.remote(1)
    with pytest.raises(PassedResponseError, match="Await it, or pass it to the remote"):
        pickle.dumps(response)
    with pytest.raises(serve.errors.BadRequestError, match="msgpack"):
        first.options(request_serialization="msgpack").remote(response)


def test_a_replica_chains_the_calls_that_it_makes(
    client: Client, first: serve.Handle, second: serve.Handle
) -> None:
    class Chain:
        def __init__(self, first: serve.Handle, second: serve.Handle) -> None:
            self.first, self.second = first, second

        async def __call__(self, size: int) -> int:
            return int(await self.second.remote(self.first.remote(size)))

    client.deploy("chain", Chain, first, second)
    for size in (10, LARGE):
        assert client.get_handle("chain").remote(size).result(DEADLINE_S) == size


def test_a_result_that_its_worker_lost_is_an_error(first: serve.Handle, second: serve.Handle) -> None:
    between = first.remote(LARGE)
    assert second.remote(between).result(DEADLINE_S) == LARGE
    kept: Any = between._future.result()
    kept.release()
    with pytest.raises(UnavailableError, match="no longer has a result"):
        second.remote(between).result(DEADLINE_S)


def test_a_request_is_passed_on_once_its_body_has_been_read(client: Client) -> None:
    handle = client.get_handle("reader")
    scope = {"type": "http", "method": "PUT", "path": "/", "headers": [], "query_string": b""}

    async def main() -> None:
        parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        request = Request(scope, parts.get)
        response, other = handle.remote(request), handle.remote(request=request)
        parts.put_nowait({"type": "http.request", "body": b"one ", "more_body": True})
        await asyncio.sleep(0)
        assert not response.done()
        parts.put_nowait({"type": "http.request", "body": b"two", "more_body": False})
        assert await response == await other == ["PUT", "one two", 0]
        assert await handle.remote(request, more=2) == ["PUT", "one two", 2]
        assert await request.body() == b"one two"

        left = Request(scope, parts.get)
        failing = handle.remote(left)
        parts.put_nowait({"type": "http.disconnect"})
        with pytest.raises(ClientDisconnect):
            await failing

    asyncio.run(main())
    with pytest.raises(PassedResponseError, match="this thread cannot wait for it"):
        handle.remote(Request(scope, asyncio.Queue().get))
