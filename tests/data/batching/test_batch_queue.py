"""The queue of both kinds of batching, for behavior that tests of `batch` (test_batched.py) cannot see."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any

import pytest

from daskserve.common.clock import LoopClock
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.queue import BatchQueue
from daskserve.errors import ServeError, UserCodeError
from daskserve.options.fields.priority import BATCH_PRIORITY

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


def test_without_a_wait_items_of_one_loop_iteration_share_a_batch() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        await asyncio.gather(*submit(queue, 1, 2))
        assert await queue.submit(3) == 30
        assert runner.batches == [[1, 2], [3]]

    run(scenario, wait_s=0)


def test_the_duration_of_a_batch_does_not_depend_on_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s: list[float] = []

    async def answer(items: list[Any]) -> Sequence[Any]:
        monkeypatch.setattr(LoopClock, "wall", lambda self: 1e12)
        return items

    async def scenario() -> None:
        queue: BatchQueue[Any, Any] = BatchQueue(answer, BatchLimits(1, 0), on_end=took_s.append)
        await queue.submit(1)
        await turns()

    asyncio.run(scenario())
    assert len(took_s) == 1
    assert 0 < took_s[0] < LONG_S


def test_batches_that_are_not_serial_overlap() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        tasks = submit(queue, 1, 2, 3, 4, 5, 6)
        await turns()
        assert runner.batches == [[1, 2, 3], [4, 5, 6]]
        runner.go.set()
        await asyncio.gather(*tasks)

    run(scenario, max_running=None)


def test_batches_of_jobs_leave_one_of_several_free_for_others() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.go.clear()
        job = [asyncio.create_task(queue.submit(item, item % 2, BATCH_PRIORITY)) for item in range(6)]
        await turns()
        assert runner.batches == [[0, 2, 4]]
        live = submit(queue, 7, key=1)
        await turns()
        assert runner.batches == [[0, 2, 4], [7, 1, 3]]
        runner.go.set()
        await asyncio.gather(*job, *live)
        assert runner.batches[2:] == [[5]]

    run(scenario, wait_s=0, max_running=2)


def test_a_runner_that_loses_results_fails_the_batch() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        runner.answer = lambda items: items[1:]
        results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
        assert all(isinstance(result, ServeError) for result in results)

    run(scenario)


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


def _always(results: list[Any], items: list[Any]) -> list[Any]:
    return results


class Mute(BaseException):
    def __str__(self) -> str:
        return 402  # type: ignore[return-value]


def test_a_result_that_cannot_be_raised_fails_only_its_item() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        for kind in (StopIteration, StopAsyncIteration, SystemExit, asyncio.CancelledError, Mute):
            runner.answer = partial(_always, [1, kind(), 3])
            results = await asyncio.gather(*submit(queue, 1, 2, 3), return_exceptions=True)
            assert (results[0], type(results[1]), results[2]) == (1, UserCodeError, 3), kind

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


def test_a_batch_into_which_no_item_fits_runs_at_once() -> None:
    async def scenario(queue: BatchQueue[Any, Any], runner: Runner) -> None:
        first = submit(queue, 4, 6)
        await asyncio.gather(*first)
        second = submit(queue, 7, 5)
        await second[0]
        assert runner.batches == [[4, 6], [7]]
        second[1].cancel()

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
    """An item whose own size fails raises it; an item that only fails with others gets another batch."""

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
