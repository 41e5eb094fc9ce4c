"""Large arguments and results of calls: what later changes do to them, and how long they are kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from dask_processes import poll_for
from gates import Gates, anew_for_each_test
from starlette.exceptions import HTTPException
from tables import each_case

from daskserve.common.types import SHARED_BYTES, Payload
from daskserve.testing import local_instance

gates = Gates()
fresh = anew_for_each_test(gates)

COUNT = SHARED_BYTES // 8
DEADLINE_S = 10.0


class Filled:
    """Fills one array again and again."""

    def __init__(self) -> None:
        self._array = np.zeros(COUNT)

    def hold(self) -> None:
        assert gates.go.wait(DEADLINE_S)

    def first(self, *arrays: Any) -> list[float]:
        return [float(each[0]) for each in arrays]

    def fill(self, value: float) -> Any:
        self._array[:] = value
        return self._array

    def fills(self, array: Any, values: list[float]) -> Iterator[Any]:
        for value in values:
            yield self.fill(value)

    def fail(self, array: Any) -> None:
        # This error is not logged: pytest keeps log records, whose tracebacks refer to the argument.
        raise HTTPException(418)

    def fails(self, array: Any) -> Iterator[Any]:
        yield array[0]
        raise HTTPException(418)


class Kept:
    """An object of a caller, or of a deployment."""


class Waiting:
    """Waits until it is cancelled, with an object that it has made."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Kept]] = []

    async def wait(self) -> None:
        kept = Kept()
        self.made.append(weakref.ref(kept))
        await asyncio.sleep(10 * DEADLINE_S)

    async def waits(self) -> AsyncIterator[None]:
        kept = Kept()
        self.made.append(weakref.ref(kept))
        await asyncio.sleep(10 * DEADLINE_S)
        yield

    async def count(self) -> tuple[int, int]:
        return len(self.made), sum(each() is not None for each in self.made)


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    with local_instance() as client:
        client.deploy("filled", Filled, config={"max_ongoing_requests": 1})
        yield client.get_handle("filled")


def test_an_array_may_be_filled_again_once_remote_has_returned(handle: Any) -> None:
    array = np.zeros(COUNT)
    held = handle.hold.remote()
    waiting = []
    for number in range(3):
        array[:] = number
        waiting.append(handle.first.remote(array, array[1:]))
    gates.go.set()
    held.result(DEADLINE_S)
    assert [each.result(DEADLINE_S) for each in waiting] == [[number, number] for number in range(3)]


def test_map_takes_arrays_that_are_filled_again(handle: Any) -> None:
    array = np.zeros(COUNT)

    def filled() -> Iterator[Any]:
        for number in range(5):
            array[:] = number
            yield array

    assert list(handle.first.map(filled())) == [[number] for number in range(5)]


def test_a_deployment_may_fill_an_array_again_that_it_has_returned(handle: Any) -> None:
    results = [handle.fill.remote(number) for number in range(3)]
    assert [each.result(DEADLINE_S)[0] for each in results] == [0, 1, 2]


def test_a_deployment_may_fill_an_array_again_that_it_has_yielded(handle: Any) -> None:
    stream = handle.options(stream=True).fills.remote(None, [0, 1, 2])
    assert [each[0] for each in list(stream)] == [0, 1, 2]


# ---- how long


@contextmanager
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _call(handle: Any, array: Any) -> None:
    handle.first.remote(array).result(DEADLINE_S)


def _idempotent_call(handle: Any, array: Any) -> None:
    handle.options(idempotent=True).first.remote(array).result(DEADLINE_S)


def _call_in_time(handle: Any, array: Any) -> None:
    handle.options(timeout_s=DEADLINE_S).first.remote(array).result(DEADLINE_S)


def _failed_call(handle: Any, array: Any) -> None:
    with suppress(HTTPException):
        handle.fail.remote(array).result(DEADLINE_S)


def _failed_stream(handle: Any, array: Any) -> None:
    with suppress(HTTPException):
        for _ in handle.options(stream=True).fails.remote(array):
            pass


def _cancelled_call(handle: Any, array: Any) -> None:
    handle.first.remote(array).cancel()


def _stream(handle: Any, array: Any) -> None:
    for _ in handle.options(stream=True).fills.remote(array, [0, 1]):
        pass


def _cancelled_stream(handle: Any, array: Any) -> None:
    stream = handle.options(stream=True).fills.remote(array, [0, 1, 2])
    next(iter(stream))
    stream.cancel()


def _map(handle: Any, array: Any) -> None:
    list(handle.first.map([array, array]))


@each_case(
    "call",
    [
        _call,
        _idempotent_call,
        _call_in_time,
        _failed_call,
        _failed_stream,
        _cancelled_call,
        _stream,
        _cancelled_stream,
        _map,
    ],
)
def test_an_ended_call_releases_its_arguments_and_results_without_a_garbage_collection(
    handle: Any, call: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(handle, np.zeros(COUNT))
    payloads: list[weakref.ref[memoryview]] = []
    made = Payload.__init__

    def watch(self: Payload, data: Any, buffers: tuple[Any, ...] = ()) -> None:
        payloads.extend(weakref.ref(each) for each in buffers if isinstance(each, memoryview))
        made(self, data, buffers)

    with without_collection():
        with monkeypatch.context() as patch:
            patch.setattr(Payload, "__init__", watch)
            call(handle, np.zeros(COUNT))
        assert payloads
        poll_for(lambda: not any(each() is not None for each in payloads), DEADLINE_S)


def _waits(handle: Any, kept: Kept) -> None:
    handle.fail.remote(None).result(DEADLINE_S)


def _iterates(handle: Any, kept: Kept) -> None:
    for _ in handle.options(stream=True).fails.remote([0]):
        pass


async def _failing(call: Coroutine[Any, Any, None]) -> None:
    with suppress(HTTPException):  # asyncio.run() would keep it
        await call


def _awaits(handle: Any, kept: Kept) -> None:
    async def call(kept: Kept) -> None:
        await handle.fail.remote(None)

    asyncio.run(_failing(call(kept)))


def _iterates_in_a_loop(handle: Any, kept: Kept) -> None:
    async def call(kept: Kept) -> None:
        async for _ in handle.options(stream=True).fails.remote([0]):
            pass

    asyncio.run(_failing(call(kept)))


@pytest.mark.parametrize("call", [_waits, _iterates, _awaits, _iterates_in_a_loop])
def test_a_failed_call_keeps_nothing_of_its_caller(handle: Any, call: Callable[[Any, Kept], None]) -> None:
    kept = Kept()
    gone = weakref.ref(kept)
    with without_collection():
        with suppress(HTTPException):
            call(handle, kept)
        del kept
        assert gone() is None


@pytest.mark.parametrize("method", ["wait", "waits"])
def test_a_cancelled_request_keeps_nothing_of_the_deployment(method: str) -> None:
    with local_instance() as client:
        client.deploy("waiting", Waiting)
        waiting = client.get_handle("waiting")
        with without_collection():
            call = waiting.options(method_name=method, stream=method == "waits").remote()
            poll_for(lambda: waiting.count.remote().result(DEADLINE_S) == (1, 1), DEADLINE_S)
            call.cancel()
            poll_for(lambda: waiting.count.remote().result(DEADLINE_S) == (1, 0), DEADLINE_S)
