"""Classic batching: who goes together, and what becomes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from daskserve.data.batching import (
    MARK,
    Batch,
    BatchItem,
    BatchQueue,
    accept_batch,
    answer_batch,
    answer_batch_in_thread,
)
from daskserve.data.conversion import Answer, Unfinished
from daskserve.errors import ServeError, UserCodeError
from daskserve.payload import dump, load
from daskserve.types import Payload

LONG_S = 60.0


class Runner:
    """Runs batches as told: records them, and holds each until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self.go.set()
        self.answer: Callable[[list[Any]], Sequence[Any]] = lambda items: [item * 10 for item in items]

    async def __call__(self, items: list[Any]) -> Sequence[Any]:
        self.batches.append(items)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.answer(items)


def run(
    scenario: Callable[[BatchQueue[Any, Any], Runner], Awaitable[None]],
    *,
    max_batch_size: int = 3,
    wait_s: float = LONG_S,
    is_serial: bool = True,
) -> None:
    async def main() -> None:
        runner = Runner()
        queue: BatchQueue[Any, Any] = BatchQueue(
            runner, max_batch_size=max_batch_size, wait_s=wait_s, is_serial=is_serial
        )
        async with asyncio.timeout(10):
            await scenario(queue, runner)

    asyncio.run(main())


def submit(queue: BatchQueue[Any, Any], *items: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(queue.submit(item)) for item in items]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- the queue


def test_a_full_batch_runs_at_once() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        assert await asyncio.gather(*submit(queue, 1, 2, 3)) == [10, 20, 30]
        assert runner.batches == [[1, 2, 3]]

    run(scenario)


def test_a_batch_that_does_not_fill_runs_when_its_first_item_has_waited_long_enough() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks = submit(queue, 1, 2)
        await turns()
        assert runner.batches == []
        assert queue.queued == 2
        assert await asyncio.gather(*tasks) == [10, 20]
        assert loop.time() - began >= 0.019
        assert runner.batches == [[1, 2]]

    run(scenario, wait_s=0.02)


def test_without_a_wait_what_comes_in_one_turn_goes_together() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        await asyncio.gather(*submit(queue, 1, 2))
        assert await queue.submit(3) == 30
        assert runner.batches == [[1, 2], [3]]

    run(scenario, wait_s=0)


def test_what_comes_during_a_serial_batch_gathers_for_the_next() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 1)
        await turns()
        tasks += submit(queue, 2, 3, 4, 5)
        await turns()
        assert runner.batches == [[1]]
        runner.go.set()
        await asyncio.gather(*tasks)
        assert runner.batches == [[1], [2, 3, 4], [5]]

    run(scenario, wait_s=0)


def test_batches_that_are_not_serial_overlap() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 1, 2, 3, 4, 5, 6)
        await turns()
        assert runner.batches == [[1, 2, 3], [4, 5, 6]]
        runner.go.set()
        await asyncio.gather(*tasks)

    run(scenario, is_serial=False)


def test_a_cancelled_item_is_taken_out_before_its_batch_runs() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = submit(queue, 1, 2)
        await turns()
        tasks[0].cancel()
        await turns()
        assert queue.queued == 1
        tasks += submit(queue, 3, 4)
        await asyncio.gather(*tasks[1:])
        assert runner.batches == [[2, 3, 4]]

    run(scenario)


def test_a_running_batch_goes_on_for_the_items_that_are_still_wanted() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 1, 2, 3)
        await turns()
        tasks[0].cancel()
        await turns()
        runner.go.set()
        assert await asyncio.gather(*tasks[1:]) == [20, 30]
        assert runner.cancelled == 0

    run(scenario)


def test_a_batch_that_nobody_wants_any_more_is_cancelled_and_the_next_one_runs() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 1, 2, 3)
        await turns()
        for task in tasks:
            task.cancel()
        await turns()
        assert runner.cancelled == 1
        runner.go.set()
        assert await asyncio.gather(*submit(queue, 4, 5, 6)) == [40, 50, 60]

    run(scenario)


def test_an_exception_goes_to_all_items_of_that_batch_and_to_no_other() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        def fail(items: list[Any]) -> Sequence[Any]:
            raise ValueError("broken")

        answer, runner.answer = runner.answer, fail
        results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
        assert [str(result) for result in results] == ["broken"] * 3
        runner.answer = answer
        assert await asyncio.gather(*submit(queue, 4, 5, 6)) == [40, 50, 60]

    run(scenario)


def test_an_exception_among_the_results_is_raised_for_its_item_alone() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.answer = lambda items: [1, ValueError("second"), 3]
        results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
        assert [repr(result) for result in results] == ["1", "ValueError('second')", "3"]

    run(scenario)


def test_a_runner_that_loses_results_fails_the_batch() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.answer = lambda items: items[1:]
        results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
        assert all(isinstance(result, ServeError) for result in results)

    run(scenario)


def test_changed_limits_hold_for_what_is_submitted_next() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        queue.max_batch_size = 2
        await asyncio.gather(*submit(queue, 1, 2))
        queue.max_batch_size, queue.wait_s = 9, 0
        await queue.submit(3)
        assert runner.batches == [[1, 2], [3]]

    run(scenario)


def test_a_queue_survives_a_storm_of_cancellations_and_errors() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        def sometimes(items: list[Any]) -> Sequence[Any]:
            if items[0] % 4 == 0:
                raise ValueError("now and then")
            return items

        runner.answer = sometimes
        for number in range(50):
            tasks = submit(queue, *range(number, number + 5))
            await turns(number % 4)
            for task in tasks[:: 1 + number % 3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.queued == 0
        assert await queue.submit(7) == 7

    run(scenario, wait_s=0)


# ---- the user's side


def test_the_mark_is_where_the_classic_system_had_it() -> None:
    @accept_batch
    def function(requests: list[Any]) -> list[Any]:
        return requests

    assert MARK == "_serve_accept_batch"
    assert function._serve_accept_batch is True  # type: ignore[attr-defined]


def call(data: Any = None, **kwargs: Any) -> BatchItem:
    return BatchItem({"legacy": True}, payload=dump(((data,), kwargs)))


def http(body: bytes = b"") -> BatchItem:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    return BatchItem(scope, scope, body)


def answer_both_ways(function: Callable[[list[Any]], Any], items: list[BatchItem]) -> list[Any]:
    """Return the outcomes, having made sure that the async way comes to the same."""

    async def async_function(requests: list[Any]) -> Any:
        return function(requests)

    plain = answer_batch_in_thread(function, "Method f", items, False)
    other = asyncio.run(answer_batch(async_function, "Method f", items, False))
    assert [str(outcome) for outcome in plain] == [str(outcome) for outcome in other]
    return plain


def body_of(outcome: Any) -> tuple[int, bytes]:
    assert isinstance(outcome, Answer)
    return outcome.messages[0]["status"], outcome.messages[1]["body"]


def test_http_requests_and_calls_share_a_batch() -> None:
    def function(requests: list[Any]) -> list[Any]:
        return [requests[0].data + 1, requests[1].body_json + 1, requests[2].query_params["k"]]

    first, second, third = answer_both_ways(function, [call(1), http(b"2"), call(k="v")])
    assert load(first) == 2
    assert body_of(second) == (200, b"3")
    assert load(third) == "v"


@pytest.mark.parametrize(
    ("results", "match"),
    [
        ([1], "it got 2 and returned 1"),
        ([1, 2, 3], "it got 2 and returned 3"),
        (None, "returned a NoneType"),
        ("ab", "returned a str"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ({1, 2}, "returned a set"),
    ],
)
def test_anything_but_one_result_per_request_fails_all_of_them(results: Any, match: str) -> None:
    first, second = answer_both_ways(lambda requests: results, [call(), http()])
    assert isinstance(first, ServeError)
    assert match in str(first)
    assert body_of(second) == (500, b"Internal Server Error")


def test_any_ordered_results_will_do() -> None:
    for results in ((1, 2), iter([1, 2])):
        outcomes = answer_batch_in_thread(lambda requests, r=results: r, "f", [call(), call()], False)  # type: ignore[misc]
        assert [load(outcome) for outcome in outcomes if isinstance(outcome, Payload)] == [1, 2]


def test_an_exception_of_user_code_is_logged_once_for_the_whole_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def function(requests: list[Any]) -> list[Any]:
        raise KeyError("broken")

    outcomes = answer_batch_in_thread(function, "Method f", [call(), http(), http()], False)
    assert isinstance(outcomes[0], KeyError)
    assert [body_of(outcome)[0] for outcome in outcomes[1:]] == [500, 500]
    assert caplog.text.count("KeyError: 'broken'") == 1


def test_one_bad_result_or_argument_fails_one_request() -> None:
    def function(requests: list[Any]) -> list[Any]:
        return [object() if request.data == "bad" else request.data for request in requests]

    unreadable = BatchItem({"legacy": True}, payload=Payload(b"not a pickle"))
    outcomes = answer_batch_in_thread(function, "Method f", [call(1), unreadable, call(3)], False)
    assert load(outcomes[0]) == 1  # type: ignore[arg-type]
    assert isinstance(outcomes[1], Exception)
    assert load(outcomes[2]) == 3  # type: ignore[arg-type]

    generator = answer_batch_in_thread(lambda r: [(n for n in r), 2], "Method f", [call(), call()], False)
    assert isinstance(generator[0], UserCodeError)
    assert load(generator[1]) == 2  # type: ignore[arg-type]


def test_user_code_is_not_called_for_a_batch_without_readable_requests() -> None:
    unreadable = BatchItem({"legacy": True}, payload=Payload(b"not a pickle"))
    (outcome,) = answer_batch_in_thread(lambda requests: 1 / 0, "Method f", [unreadable], False)
    assert not isinstance(outcome, ZeroDivisionError)
    assert isinstance(outcome, Exception)


def test_an_exception_as_a_result_fails_its_request_alone() -> None:
    outcomes = Batch("f", [call(), http(), http()], is_debug=False).split(
        [ValueError("v"), "ok", ValueError("v")]
    )
    assert repr(outcomes[0]) == "ValueError('v')"
    assert [body_of(outcome)[0] for outcome in outcomes[1:]] == [200, 500]


def test_a_streaming_result_is_left_to_the_request() -> None:
    (outcome,) = Batch("f", [http()], is_debug=False).split([iter_chunks()])
    assert isinstance(outcome, Unfinished)


def iter_chunks() -> Any:
    yield "a"
