"""The queue of both kinds of batching."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

import pytest

from daskserve.data.batching.queue import BatchLimits, BatchQueue
from daskserve.errors import ServeError, UserCodeError

LONG_S = 60.0


class Runner:
    """Records the batches, and holds each until it is released."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self.go.set()
        self.limits = BatchLimits(1, 0)
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
    max_running: int | None = 1,
    size_of: Callable[[list[Any]], float] | None = None,
) -> None:
    async def main() -> None:
        runner = Runner()
        runner.limits = BatchLimits(max_batch_size, wait_s)
        queue: BatchQueue[Any, Any] = BatchQueue(
            runner, runner.limits, max_running=max_running, size_of=size_of
        )
        async with asyncio.timeout(10):
            await scenario(queue, runner)
        await turns()
        assert (queue.queued(), queue.running) == (0, {})

    asyncio.run(main())


def submit(queue: BatchQueue[Any, Any], *items: Any, key: Hashable = None) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(queue.submit(item, key)) for item in items]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_full_batch_runs_at_once() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        assert await asyncio.gather(*submit(queue, 1, 2, 3)) == [10, 20, 30]
        assert runner.batches == [[1, 2, 3]]

    run(scenario)


def test_a_partial_batch_runs_when_its_first_item_has_waited_long_enough() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks = submit(queue, 1, 2)
        await turns()
        assert runner.batches == []
        assert queue.queued() == 2
        assert await asyncio.gather(*tasks) == [10, 20]
        assert loop.time() - began >= 0.019
        assert runner.batches == [[1, 2]]

    run(scenario, wait_s=0.02)


def test_without_a_wait_items_of_one_loop_iteration_share_a_batch() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        await asyncio.gather(*submit(queue, 1, 2))
        assert await queue.submit(3) == 30
        assert runner.batches == [[1, 2], [3]]

    run(scenario, wait_s=0)


def test_items_added_during_a_serial_batch_form_the_next() -> None:
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

    run(scenario, max_running=None)


def test_a_cancelled_item_is_removed_before_its_batch_runs() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = submit(queue, 1, 2)
        await turns()
        tasks[0].cancel()
        await turns()
        assert queue.queued() == 1
        tasks += submit(queue, 3, 4)
        await asyncio.gather(*tasks[1:])
        assert runner.batches == [[2, 3, 4]]

    run(scenario)


def test_a_running_batch_continues_for_its_remaining_items() -> None:
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


def test_a_batch_without_callers_is_cancelled_and_the_next_one_runs() -> None:
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


def test_an_exception_fails_all_items_of_its_batch_and_no_others() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        def fail(items: list[Any]) -> Sequence[Any]:
            raise ValueError("broken")

        answer, runner.answer = runner.answer, fail
        results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
        assert [str(result) for result in results] == ["broken"] * 3
        runner.answer = answer
        assert await asyncio.gather(*submit(queue, 4, 5, 6)) == [40, 50, 60]

    run(scenario)


def test_an_exception_among_the_results_is_raised_for_its_item_only() -> None:
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


def test_changed_limits_apply_to_the_next_items() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.limits.max_batch_size = 2
        await asyncio.gather(*submit(queue, 1, 2))
        runner.limits.max_batch_size, runner.limits.wait_s = 9, 0
        await queue.submit(3)
        assert runner.batches == [[1, 2], [3]]

    run(scenario)


def test_a_queue_survives_many_cancellations_and_errors() -> None:
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
        assert queue.queued() == 0
        assert await queue.submit(7) == 7

    run(scenario, wait_s=0)


def test_lowered_limits_apply_to_waiting_items() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        for size, wait_s in ((2, LONG_S), (9, 0.0)):
            runner.limits.max_batch_size, runner.limits.wait_s = 3, LONG_S
            tasks = submit(queue, 1, 2)
            await turns()
            assert runner.batches == []
            runner.limits.max_batch_size, runner.limits.wait_s = size, wait_s
            queue.reconsider()
            await asyncio.gather(*tasks)
            assert runner.batches.pop() == [1, 2]

    run(scenario)


def test_at_most_max_running_batches_run_at_a_time() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 1, 2, 3, 4, 5, 6, 7, 8, 9)
        await turns()
        assert runner.batches == [[1, 2, 3], [4, 5, 6]]
        assert queue.queued() == 3
        runner.go.set()
        await asyncio.gather(*tasks)
        assert runner.batches[2] == [7, 8, 9]

    run(scenario, max_running=2)


def test_items_of_different_keys_never_share_a_batch() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = []
        for number in range(3):
            tasks += submit(queue, number, key="a") + submit(queue, number + 100, key="b")
        await asyncio.gather(*tasks)
        assert runner.batches == [[0, 1, 2], [100, 101, 102]]

    run(scenario)


def test_of_two_keys_the_one_that_waits_longer_goes_first() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 0)
        await turns()
        for number in range(1, 9):
            tasks += submit(queue, number, key=number % 2)
        await turns()
        runner.go.set()
        await asyncio.gather(*tasks)
        assert runner.batches == [[0], [1, 3, 5], [2, 4, 6], [7], [8]]

    run(scenario, wait_s=0)


def test_an_item_cancelled_just_before_its_batch_starts_is_not_in_it() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = submit(queue, 1, 2, 3)
        await asyncio.sleep(0)
        assert queue.queued() == 3
        tasks[1].cancel()
        tasks += submit(queue, 4)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert runner.batches == [[1, 3, 4]]

    run(scenario)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError("own")]
)
def test_errors_of_user_code_never_end_the_loop_or_look_like_a_cancellation(
    error: BaseException,
) -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        def fail(items: list[Any]) -> Sequence[Any]:
            raise error

        answer, runner.answer = runner.answer, fail
        for results in (
            await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True),
            await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True),
        ):
            assert {type(result) for result in results} == {UserCodeError}
            assert type(error).__name__ in str(results[0])
        runner.answer = answer
        assert await asyncio.gather(*submit(queue, 1, 2, 3)) == [10, 20, 30]

    run(scenario)


class Mute(BaseException):
    def __str__(self) -> str:
        return 402  # type: ignore[return-value]


@pytest.mark.parametrize(
    "result", [StopIteration(1), StopAsyncIteration(), SystemExit(1), asyncio.CancelledError(), Mute()]
)
def test_a_result_that_cannot_be_raised_fails_only_its_item(result: BaseException) -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.answer = lambda items: [1, result, 3]
        results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
        assert (results[0], type(results[1]), results[2]) == (1, UserCodeError, 3)

    run(scenario)


def test_a_failure_after_all_callers_have_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        async def stubborn(items: list[Any]) -> Sequence[Any]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("while cleaning up") from None
            return items

        queue._run = stubborn
        tasks = submit(queue, 1, 2, 3)
        await turns()
        for task in tasks:
            task.cancel()
        await turns()
        assert "while cleaning up" in caplog.text

    run(scenario)


def test_an_error_holds_no_reference_to_its_batch() -> None:
    class Item:
        pass

    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        def fail(items: list[Any]) -> Sequence[Any]:
            raise ValueError

        runner.answer = fail
        item = Item()
        gone = weakref.ref(item)
        with pytest.raises(ValueError):
            await queue.submit(item)
        runner.batches.clear()
        del item
        await turns()
        assert gone() is None

    gc.collect()
    gc.disable()
    try:
        run(scenario, max_batch_size=1)
    finally:
        gc.enable()


# ---- with a measure of one's own


def test_size_of_decides_the_size_of_a_batch() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = submit(queue, 4, 5, 2, 8, 1, 1)
        await asyncio.gather(*tasks)
        assert runner.batches == [[4, 5], [2, 8], [1, 1]]

    run(scenario, max_batch_size=10, wait_s=0.02, size_of=sum)


def test_a_batch_into_which_no_item_fits_runs_at_once() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        first = submit(queue, 4, 6)
        await asyncio.gather(*first)
        second = submit(queue, 7, 5)
        await second[0]
        assert runner.batches == [[4, 6], [7]]
        second[1].cancel()

    run(scenario, max_batch_size=10, size_of=sum)


def test_an_item_that_is_too_large_alone_is_refused_without_affecting_others() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = submit(queue, 4, 11, 6)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert (results[0], results[2]) == (40, 60)
        assert type(results[1]) is RuntimeError
        assert "11" in str(results[1])
        assert "max_batch_size" in str(results[1])
        assert runner.batches == [[4, 6]]

    run(scenario, max_batch_size=10, size_of=sum)


def test_a_waiting_item_that_a_lowered_limit_makes_too_large_is_refused() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        tasks = submit(queue, 8, 1)
        await turns()
        runner.limits.max_batch_size, runner.limits.wait_s = 5, 0
        queue.reconsider()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert type(results[0]) is RuntimeError
        assert results[1] == 10

    run(scenario, max_batch_size=10, size_of=sum)


@pytest.mark.parametrize("error", [ValueError("measure"), SystemExit(1)])
def test_an_error_of_size_of_fails_its_item_and_the_queue_continues(error: BaseException) -> None:
    """An item that fails alone fails; one that fails with others gets its own batch."""

    def measure(items: list[Any]) -> float:
        if "bad" in items or len(items) > 2:
            raise error
        return len(items)

    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        with pytest.raises(type(error)):
            queue.add("bad")
        tasks = submit(queue, 1, 2, 3, 4)
        assert await asyncio.gather(*tasks) == [10, 20, 30, 40]
        assert runner.batches == [[1, 2], [3, 4]]

    run(scenario, max_batch_size=10, wait_s=0.02, size_of=measure)


@pytest.mark.parametrize("size", [None, "many", float("nan")])
def test_a_size_that_is_no_number_is_an_error(size: Any) -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        with pytest.raises((TypeError, RuntimeError)):
            queue.add(1)

    run(scenario, size_of=lambda items: size)
