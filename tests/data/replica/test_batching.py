"""Classic batching: which requests share a batch, and the outcome of each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from daskserve.common.types import Payload
from daskserve.data.replica.requests.accept_batch import (
    BatchItem,
    accept_batch,
    answer_batch,
    answer_batch_in_thread,
)
from daskserve.data.replica.user_code.definitions import ACCEPT_BATCH
from daskserve.data.replica.user_code.responses import ConvertedResponse, Unfinished
from daskserve.errors import ServeError, UserCodeError
from daskserve.payload.packed_errors import PackedError
from daskserve.payload.pickling import dump


def test_the_mark_is_where_the_classic_system_had_it() -> None:
    @accept_batch
    def function(requests: list[Any]) -> list[Any]:
        return requests

    assert ACCEPT_BATCH == "_serve_accept_batch"
    assert function._serve_accept_batch is True  # type: ignore[attr-defined]


def call(data: Any = None, **kwargs: Any) -> BatchItem:
    return BatchItem({"legacy": True}, payload=dump(((data,), kwargs)))


def http(body: bytes = b"") -> BatchItem:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    return BatchItem(scope, scope, body)


def answer_both_ways(function: Callable[[list[Any]], Any], items: list[BatchItem]) -> list[Any]:
    """Return the outcomes, after checking that the async function has the same."""

    async def async_function(requests: list[Any]) -> Any:
        return function(requests)

    plain = answer_batch_in_thread(function, "Method f", items)
    other = asyncio.run(answer_batch(async_function, "Method f", items))
    assert [str(outcome) for outcome in plain] == [str(outcome) for outcome in other]
    return plain


def body_of(outcome: Any) -> tuple[int, bytes]:
    assert isinstance(outcome, ConvertedResponse)
    assert outcome.message is not None
    return outcome.message["status"], outcome.message["body"]


@pytest.mark.parametrize(
    ("results", "match"),
    [
        ([1], "it got 2 and returned 1"),
        ([1, 2, 3], "it got 2 and returned 3"),
        (None, "returned a NoneType"),
        ("ab", "returned a str"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ({1, 2}, "returned a set"),
        (range(10**12), "returned 1000000000000"),
        (itertools.count(), "doesn't preserve batch size"),
    ],
)
def test_anything_but_one_result_per_request_fails_all_of_them(results: Any, match: str) -> None:
    first, second = answer_both_ways(lambda requests: results, [call(), http()])
    assert isinstance(first, PackedError)
    assert isinstance(first.load(), ServeError)
    assert match in str(first)
    assert second is first


def test_any_ordered_results_will_do() -> None:
    for results in ((1, 2), iter([1, 2])):
        outcomes = answer_batch_in_thread(lambda requests, r=results: r, "f", [call(), call()])  # type: ignore[misc]
        assert [outcome.load() for outcome in outcomes if isinstance(outcome, Payload)] == [1, 2]


def test_one_bad_result_or_argument_fails_one_request() -> None:
    def function(requests: list[Any]) -> list[Any]:
        return [object() if request.data == "bad" else request.data for request in requests]

    unreadable = BatchItem({"legacy": True}, payload=Payload(b"not a pickle"))
    outcomes = answer_batch_in_thread(function, "Method f", [call(1), unreadable, call(3)])
    assert outcomes[0].load() == 1  # type: ignore[union-attr]
    assert isinstance(outcomes[1], Exception)
    assert outcomes[2].load() == 3  # type: ignore[union-attr]

    generator = answer_batch_in_thread(lambda r: [(n for n in r), 2], "Method f", [call(), call()])
    assert isinstance(generator[0], PackedError)
    assert isinstance(generator[0].known, UserCodeError)
    assert generator[1].load() == 2  # type: ignore[union-attr]


def test_user_code_is_not_called_for_a_batch_without_readable_requests() -> None:
    unreadable = BatchItem({"legacy": True}, payload=Payload(b"not a pickle"))
    (outcome,) = answer_batch_in_thread(lambda requests: 1 / 0, "Method f", [unreadable])
    assert str(outcome).startswith("UnpicklingError")


def test_an_exception_as_a_result_fails_its_request_alone() -> None:
    results = [ValueError("v"), "ok", ValueError("v")]
    outcomes = answer_batch_in_thread(lambda _: results, "f", [call(), http(), http()])
    assert [str(outcomes[0]), body_of(outcomes[1]), str(outcomes[2])] == [
        "ValueError: v",
        (200, b"ok"),
        "ValueError: v",
    ]


def test_a_streaming_result_is_left_to_the_request() -> None:
    (outcome,) = answer_batch_in_thread(lambda _: [iter_chunks()], "f", [http()])
    assert isinstance(outcome, Unfinished)


def iter_chunks() -> Any:
    yield "a"
