"""Futures and collections of Dask among the arguments of a call arrive as their values."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest

import daskserve as serve
from daskserve.cluster.dask.values import MAX_ITEMS, DaskTransfer, is_dask_value, may_hold_values
from daskserve.errors import BadRequestError
from daskserve.payload.arguments import FilledPayload, take_out
from daskserve.payload.pickling import dump, dump_bytes, may_mention_dask
from daskserve.testing import local_instance


@dask.delayed  # type: ignore[misc]
def half(value: int) -> float:
    if value < 0:
        raise ValueError("negative")
    return value / 2


class Model:
    """Returns its arguments."""

    def __call__(self, request: Any) -> Any:
        return request.data

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def plain(self, value: Any) -> Any:
        return value

    async def items(self, values: Any) -> Any:
        for value in values:
            yield value


@serve.accept_batch
def batch(requests: list[Any]) -> list[Any]:
    return [request.data for request in requests]


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance() as client:
        for place in ("own", "worker"):
            client.deploy(place, Model, config={"event_loop": place})
        client.create_backend("batch", batch, config={"max_batch_size": 2})
        client.create_endpoint("batch", backend="batch")
        yield client


@pytest.fixture(params=["own", "worker"])
def handle(request: pytest.FixtureRequest, client: serve.Client) -> Any:
    return client.get_handle(request.param)


def test_values_arrive_wherever_they_are_in_the_arguments(handle: Any) -> None:
    answer = handle.echo.remote(half(3), [half(4), 1], {"a": (half(5),)}, b=half(6)).result(10)
    assert answer == ((1.5, [2.0, 1], {"a": (2.5,)}), {"b": 3.0})
    assert handle.plain.remote(half(3)).result(10) == 1.5


def test_large_values_and_large_arguments_arrive(handle: Any) -> None:
    numbers = dask.delayed(np.arange)(5000)
    got = handle.echo.remote(b"x" * 20_000, numbers, {"text": "y" * 20_000, "half": half(3)}).result(10)[0]
    assert (len(got[0]), got[1].sum(), got[2]["half"]) == (20_000, 12_497_500, 1.5)


def test_values_arrive_in_streams_batches_and_within_timeouts(client: serve.Client, handle: Any) -> None:
    assert list(handle.items.options(stream=True).remote([half(3)])) == [1.5]
    assert handle.plain.options(timeout_s=10).remote(half(3)).result() == 1.5
    assert client.get_handle("batch").remote(half(3)).result(10) == 1.5


def test_the_error_of_a_task_is_the_answer(handle: Any) -> None:
    with pytest.raises(ValueError, match="negative"):
        handle.plain.remote(half(-1)).result(10)


def test_arguments_that_only_mention_dask_are_sent_as_they_are(client: serve.Client, handle: Any) -> None:
    assert handle.plain.remote("dask distributed").result(10) == "dask distributed"
    assert repr(handle.plain.remote(handle).result(10)) == repr(handle)


def test_arguments_are_searched_for_values() -> None:
    for args, is_expected in [
        ((1, "text", None, {"a": [2.5]}), False),
        ((np.zeros(10_000),), False),
        ((half(3),), True),
        (([1, {"a": half(3)}],), True),
        ((b"x" * 100_000, {"a": [half(3)]}), True),
        ((b"x" * 100_000, {"a": ["text"]}), False),
        (([f"{number:01000}" for number in range(MAX_ITEMS)] + [half(3)],), False),
    ]:
        payload = dump((args, {}))
        assert (may_mention_dask(payload) and may_hold_values(payload, args, {})) == is_expected, args


def test_values_that_were_taken_out_are_filled_in_again() -> None:
    array = np.arange(2000)
    payload, values = take_out(([half(1), array, {"a": half(2)}], len), is_dask_value)
    assert len(values) == 2
    assert payload.buffers
    with pytest.raises(pickle.UnpicklingError):
        payload.load()
    (first, same, nested), function = FilledPayload(payload.data, payload.buffers, ["one", "two"]).load()
    assert (first, nested) == ("one", {"a": "two"})
    assert (same == array).all()
    assert callable(function)


async def test_values_that_the_worker_holds_are_not_copied() -> None:
    held, loop = {"a": [1], "b": [2]}, SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
    unused: Any = SimpleNamespace(loop=loop)
    worker: Any = SimpleNamespace(address="tcp://127.0.0.1:1", data=held)
    found = await DaskTransfer(unused, unused, worker).fetch(dump_bytes(["a", "b", "a"]))
    assert [id(each) for each in found] == [id(held[key]) for key in ("a", "b", "a")]


def test_a_result_cannot_stay_where_no_cluster_is(handle: Any) -> None:
    with pytest.raises(BadRequestError, match="needs a Dask cluster"):
        handle.plain.options(result="future").remote(1).result(10)
    for options in ({"result": "both"}, {"result": "future", "stream": True}):
        with pytest.raises(BadRequestError, match="result"):
            handle.options(**options)
