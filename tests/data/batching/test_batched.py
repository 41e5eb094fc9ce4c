"""``batch`` on methods and functions (features BA01-BA06, BA08-BA10, BA12), without a replica."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import logging
import pickle
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from tables import case

from daskserve import context as serve_context
from daskserve.context import ReplicaContext, RequestContext, current_replica, current_request
from daskserve.data.batching.decorator import batch
from daskserve.data.batching.function import BatchedFunction
from daskserve.data.batching.stream import MAX_BUFFERED_RESULTS
from daskserve.errors import BatchResultError, ServeError, UserCodeError
from daskserve.testing import run_virtual

LONG_S = 3600.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    run_virtual(main)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Model:
    """Doubles numbers, and records its batches."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.go = asyncio.Event()
        self.go.set()
        self.answer: Callable[[list[Any]], Any] = lambda items: [2 * item for item in items]
        self.cleaned: list[str] = []

    @batch
    async def double(self, items: list[Any]) -> Any:
        self.batches.append(items)
        try:
            await self.go.wait()
        finally:
            self.cleaned.append("double")
        return self.answer(items)

    @batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def by_three(self, items: list[Any]) -> Any:
        self.batches.append(items)
        await self.go.wait()
        return self.answer(items)

    @batch(max_batch_size=2, batch_wait_timeout_s=0.1, max_concurrent_batches=2)
    async def two_at_a_time(self, items: list[Any]) -> Any:
        self.batches.append(items)
        await self.go.wait()
        return items

    @batch(max_batch_size=4, batch_wait_timeout_s=0.1)
    async def combine(self, left: list[Any], right: list[Any], *more: list[Any], **named: list[Any]) -> Any:
        self.batches.append((left, right, more, named))
        return [str(each) for each in zip(left, right, strict=True)]

    @batch(max_batch_size=10, batch_wait_timeout_s=0.1, batch_size_fn=sum)
    async def weighed(self, items: list[int]) -> Any:
        self.batches.append(items)
        return items

    @batch(max_batch_size=3, batch_wait_timeout_s=0.1)
    async def count_to(self, items: list[int]) -> AsyncIterator[list[Any]]:
        self.batches.append(items)
        try:
            for number in range(max(items)):
                await self.go.wait()
                yield [number if number < item else StopIteration for item in items]
        finally:
            self.cleaned.append("count_to")


@batch(max_batch_size=3)
async def square(numbers: list[int]) -> list[int]:
    return [number * number for number in numbers]


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


def test_batches_of_preferred_sizes_run_at_once_and_others_when_the_wait_is_over() -> None:
    class Preferring(Model):
        @batch(max_batch_size=10, batch_wait_timeout_s=5, preferred_batch_sizes=[8, 3])
        async def double(self, items: list[Any]) -> Any:
            self.batches.append(len(items))
            return items

    async def scenario() -> None:
        model, loop = Preferring(), asyncio.get_running_loop()
        for count, expected, after_s in (
            (3, [3], 0),
            (9, [8, 1], 5),
            (7, [3, 3, 1], 5),
            (20, [8, 8, 3, 1], 5),
        ):
            model.batches.clear()
            began = loop.time()
            await asyncio.gather(*(model.double(n) for n in range(count)))
            assert (model.batches, loop.time() - began) == (expected, after_s)

    run(scenario)
    for options in (
        {"preferred_batch_sizes": [0]},
        {"preferred_batch_sizes": [11]},
        {"preferred_batch_sizes": [2], "latency_target_s": 1},
        {"preferred_batch_sizes": [2], "batch_size_fn": len},
    ):
        with case(options), pytest.raises(ValueError, match="preferred_batch_sizes"):
            batch(**options)  # type: ignore[call-overload]


# ---- BA01: what goes together


def test_ten_simultaneous_calls_are_one_batch_by_default() -> None:
    async def scenario() -> None:
        model = Model()
        assert await asyncio.gather(*(model.double(n) for n in range(10))) == [2 * n for n in range(10)]
        assert model.batches == [list(range(10))]

    run(scenario)


def test_a_single_call_waits_ten_milliseconds_for_others_by_default() -> None:
    async def scenario() -> None:
        assert await Model().double(4) == 8
        assert asyncio.get_running_loop().time() == pytest.approx(0.01)

    run(scenario)


def test_batches_run_one_at_a_time_by_default() -> None:
    async def scenario() -> None:
        for name, expected in (("by_three", [[0, 1, 2]]), ("two_at_a_time", [[0, 1], [2, 3]])):
            model = Model()
            model.go.clear()
            tasks = [asyncio.create_task(getattr(model, name)(n)) for n in range(6)]
            await turns()
            assert model.batches == expected
            model.go.set()
            await asyncio.gather(*tasks)
            assert [n for items in model.batches for n in items] == list(range(6))

    run(scenario)


# ---- BA02: validation


def test_an_invalid_option_is_named_with_its_value() -> None:
    for options, error in [
        ({"max_batch_size": 2.5}, TypeError),
        ({"max_batch_size": "10"}, TypeError),
        ({"max_batch_size": True}, TypeError),
        ({"max_batch_size": 0}, ValueError),
        ({"batch_wait_timeout_s": -0.1}, ValueError),
        ({"batch_wait_timeout_s": float("nan")}, ValueError),
        ({"batch_wait_timeout_s": "soon"}, TypeError),
        ({"max_concurrent_batches": 0}, ValueError),
        ({"max_concurrent_batches": 1.5}, TypeError),
        ({"batch_size_fn": 3}, TypeError),
        ({"batch_size_fn": square}, TypeError),
    ]:
        with case(options, error):
            ((name, value),) = options.items()
            with pytest.raises(error, match=name) as caught:
                batch(**options)
            assert str(value) in str(caught.value) or repr(value) in str(caught.value)


def test_a_whole_float_is_a_whole_number() -> None:
    batched = batch(max_batch_size=8.0, max_concurrent_batches=2.0)(square.__wrapped__)
    assert batched._get_max_batch_size() == 8
    batched.set_max_batch_size(4.0)
    assert batched._get_max_batch_size() == 4


def plain(items: list[int]) -> list[int]:
    return items


def plain_generator(items: list[int]) -> Any:
    yield items


def test_only_async_def_functions_can_be_batched() -> None:
    for function in [plain, plain_generator, Model, 3, "name"]:
        with case(function):
            for decorate in (batch, batch(max_batch_size=2)):
                with pytest.raises(TypeError, match="async def"):
                    decorate(function)


def test_setters_validate_too() -> None:
    for setter, value, error in [
        ("set_max_batch_size", 0, ValueError),
        ("set_max_batch_size", 1.5, TypeError),
        ("set_batch_wait_timeout_s", -1, ValueError),
    ]:
        with case(setter, value, error):
            model = Model()
            with pytest.raises(error):
                getattr(model.double, setter)(value)
            assert model.double._get_max_batch_size() == 10
            assert model.double._get_batch_wait_timeout_s() == 0.01


# ---- BA03: arguments and results


def test_the_function_gets_a_list_for_each_argument() -> None:
    async def scenario() -> None:
        model = Model()
        results = await asyncio.gather(*(model.combine(n, right=n * n) for n in range(4)))
        assert results == ["(0, 0)", "(1, 1)", "(2, 4)", "(3, 9)"]
        assert model.batches == [([0, 1, 2, 3], [0, 1, 4, 9], (), {})]
        await asyncio.gather(model.combine(1, 2, 3, word="a"), model.combine(4, 5, 6, word="b"))
        assert model.batches[1] == ([1, 4], [2, 5], ([3, 6],), {"word": ["a", "b"]})

    run(scenario)


def test_calls_with_different_arguments_do_not_share_a_batch() -> None:
    async def scenario() -> None:
        model = Model()
        calls = (
            model.combine(1, 2),
            model.combine(3, right=4),
            model.combine(5, 6, 7),
            model.combine(8, 9, k=0),
        )
        await asyncio.gather(*calls)
        assert [each[0] for each in model.batches] == [[1, 3], [5], [8]]

    run(scenario)


def test_wrong_arguments_fail_their_caller_at_once() -> None:
    async def scenario() -> None:
        model = Model()
        good = asyncio.create_task(model.combine(1, 2))
        await turns()
        with pytest.raises(TypeError, match="right"):
            model.combine(1)
        with pytest.raises(TypeError, match="too many"):
            model.double(1, 2)
        with pytest.raises(TypeError, match="called without arguments"):
            square_of_nothing()
        assert await good == "(1, 2)"

    run(scenario)


@batch
async def square_of_nothing(*numbers: list[int]) -> list[int]:
    return []


@pytest.mark.parametrize(
    "answer",
    [
        lambda items: items[1:],
        lambda items: [*items, 1],
        lambda items: None,
        lambda items: 7,
        lambda items: "ab",
        lambda items: dict.fromkeys(items),
        lambda items: iter(items[1:]),
    ],
)
def test_invalid_results_fail_the_batch_and_no_later_one(answer: Any) -> None:
    async def scenario() -> None:
        model = Model()
        right, model.answer = model.answer, answer
        results = await asyncio.gather(model.double(1), model.double(2), return_exceptions=True)
        kind = type(results[0])
        assert [type(each) for each in results] == [kind, kind]
        assert issubclass(kind, ServeError)
        is_list = isinstance(answer([1, 2]), (list, Iterator))
        assert issubclass(kind, TypeError) is not is_list
        assert "Model.double" in str(results[0])
        model.answer = right
        assert await model.double(3) == 6

    run(scenario)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ValueError("broken"), ValueError),
        (SystemExit(3), UserCodeError),
        (KeyboardInterrupt(), UserCodeError),
        (asyncio.CancelledError("own"), UserCodeError),
        (StopAsyncIteration(), UserCodeError),
        (GeneratorExit(), UserCodeError),
    ],
)
def test_an_error_of_the_function_fails_its_batch_and_no_other(
    error: BaseException, seen: type[Exception]
) -> None:
    async def scenario() -> None:
        def fail(items: list[Any]) -> Any:
            raise error

        model = Model()
        right, model.answer = model.answer, fail
        results = await asyncio.gather(model.double(1), model.double(2), return_exceptions=True)
        assert [type(each) for each in results] == [seen, seen]
        model.answer = right
        assert await model.double(3) == 6

    run(scenario)


def test_an_error_has_the_traceback_of_the_function() -> None:
    async def scenario() -> None:
        model = Model()
        model.answer = lambda items: 1 / 0
        with pytest.raises(ZeroDivisionError) as caught:
            await model.double(1)
        assert "self.answer(items)" in str(caught.getrepr(style="long"))

    run(scenario)


# ---- BA12: single failures


def test_an_exception_among_the_results_is_raised_for_its_caller_only() -> None:
    async def scenario() -> None:
        model = Model()
        model.answer = lambda items: [1, ValueError("second"), 3]
        results = await asyncio.gather(*(model.double(n) for n in range(3)), return_exceptions=True)
        assert [repr(each) for each in results] == ["1", "ValueError('second')", "3"]

    run(scenario)


# ---- BA04: generators


def test_each_caller_of_a_generator_gets_its_own_stream() -> None:
    async def scenario() -> None:
        model = Model()
        streams = await asyncio.gather(*(collect(model.count_to(n)) for n in (3, 1, 2)))
        assert streams == [[0, 1, 2], [0], [0, 1]]
        assert model.batches == [[3, 1, 2]]
        assert model.cleaned == ["count_to"]

    run(scenario)


def test_results_are_delivered_immediately_even_by_code_that_never_waits() -> None:
    order: list[Any] = []

    @batch(max_batch_size=1)
    async def busy(items: list[Any]) -> AsyncIterator[Any]:
        for number in range(3):
            order.append(("made", number))
            yield [number]

    async def scenario() -> None:
        async for number in busy(1):
            order.append(("read", number))

    run(scenario)
    assert order == [(what, number) for number in range(3) for what in ("made", "read")]


def in_steps(*steps: Any) -> Callable[..., AsyncIterator[Any]]:
    @batch(max_batch_size=2)
    async def stepping(items: list[Any]) -> AsyncIterator[Any]:
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            yield step

    return stepping


async def tell(stream: AsyncIterator[Any]) -> list[Any]:
    """Return the items of a stream, and the error with which it ends, if any."""
    found: list[Any] = []
    try:
        async for item in stream:
            found.append(item)
    except Exception as error:
        found.append(type(error))
    return found


@pytest.mark.parametrize(
    ("steps", "first", "second"),
    [
        ([], [], []),
        ([[1, 2]], [1], [2]),
        ([(1, 2), iter([3, 4])], [1, 3], [2, 4]),
        ([[1, StopAsyncIteration], [2, 5]], [1, 2], []),
        ([[1, StopIteration()], [2, None], [3, None]], [1, 2, 3], []),
        ([[StopIteration, StopIteration], [1, 2], [3, 4]], [], []),
        ([[1, ValueError()], [2, 2]], [1, 2], [ValueError]),
        ([[1, SystemExit()], [2, 2]], [1, 2], [UserCodeError]),
        ([[1, 2], [3]], [1, ServeError], [2, ServeError]),
        ([[1, 2], None], [1, BatchResultError], [2, BatchResultError]),
        ([[1, 2], "ab"], [1, BatchResultError], [2, BatchResultError]),
        ([[1, StopIteration], [3]], [1, ServeError], []),
        ([[1, 2], KeyError()], [1, KeyError], [2, KeyError]),
        ([[1, 2], SystemExit()], [1, UserCodeError], [2, UserCodeError]),
        ([[1, 2], asyncio.CancelledError()], [1, UserCodeError], [2, UserCodeError]),
    ],
)
def test_each_stream_ends_with_its_own_results(steps: list[Any], first: list[Any], second: list[Any]) -> None:
    async def scenario() -> None:
        stepping = in_steps(*steps)
        async with asyncio.timeout(10):
            assert await asyncio.gather(tell(stepping(1)), tell(stepping(2))) == [first, second]

    run(scenario)


def test_a_reader_that_leaves_leaves_its_batch_and_the_last_one_ends_it() -> None:
    async def scenario() -> None:
        model = Model()
        first, second = model.count_to(10**9), model.count_to(5)
        assert await asyncio.gather(anext(first), anext(second)) == [0, 0]
        await first.aclose()  # type: ignore[attr-defined]
        assert await anext(second) == 1
        assert model.cleaned == []
        await second.aclose()  # type: ignore[attr-defined]
        await turns()
        assert model.cleaned == ["count_to"]
        assert await collect(model.count_to(1)) == [0]  # and the next batch runs

    run(scenario)


def test_a_reader_that_is_cancelled_while_it_waits_leaves_its_batch() -> None:
    async def scenario() -> None:
        model = Model()
        model.go.clear()
        tasks = [asyncio.create_task(collect(model.count_to(2))) for _ in range(2)]
        await asyncio.sleep(1)
        tasks[0].cancel()
        await turns()
        assert model.cleaned == []
        tasks[1].cancel()
        await turns()
        assert model.cleaned == ["count_to"]

    run(scenario)


def test_a_generator_without_readers_gets_one_more_step_to_end() -> None:
    notes: list[str] = []

    @batch(max_batch_size=1)
    async def ends(items: list[Any]) -> AsyncIterator[Any]:
        yield [StopIteration]
        notes.append("after the last")

    @batch(max_batch_size=1)
    async def goes_on(items: list[Any]) -> AsyncIterator[Any]:
        try:
            while True:
                yield [StopIteration]
                notes.append("again")
        finally:
            notes.append("closed")

    async def scenario() -> None:
        assert await collect(ends(1)) == []
        await turns()
        assert notes == ["after the last"]
        assert await collect(goes_on(1)) == []
        await turns()
        assert notes[1:] == ["again", "closed"]

    run(scenario)


def test_a_generator_that_refuses_to_close_does_not_affect_later_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn:
        @batch(max_batch_size=1)
        async def count(self, items: list[Any]) -> AsyncIterator[Any]:
            while True:
                try:
                    yield [1]
                except GeneratorExit:
                    yield [2]

    async def scenario() -> None:
        stubborn = Stubborn()
        for _ in range(3):
            stream = stubborn.count(1)
            assert await anext(stream) == 1
            await stream.aclose()  # type: ignore[attr-defined]
            await turns()

    run(scenario)
    assert "ignored GeneratorExit" in caplog.text


def test_a_slow_reader_blocks_its_batch_at_the_buffer_limit_until_it_leaves() -> None:
    made: list[int] = []

    @batch(max_batch_size=2)
    async def endless(items: list[Any]) -> AsyncIterator[Any]:
        while True:
            made.append(1)
            yield [len(made)] * 2

    async def scenario() -> None:
        slow, quick = endless(1), endless(2)
        await asyncio.gather(anext(slow), anext(quick))
        while True:
            try:
                async with asyncio.timeout(1):
                    await anext(quick)
            except TimeoutError:
                break
        assert len(made) == MAX_BUFFERED_RESULTS + 1
        other = endless(3)
        await slow.aclose()  # type: ignore[attr-defined]
        await other.aclose()  # type: ignore[attr-defined]

    run(scenario)


# ---- BA05: at run time


def test_changed_limits_apply_to_one_instance_and_to_its_waiting_calls() -> None:
    async def scenario() -> None:
        model, other = Model(), Model()
        tasks = [asyncio.create_task(model.by_three(n)) for n in range(2)]
        await turns()
        model.by_three.set_max_batch_size(2)
        assert await asyncio.gather(*tasks) == [0, 2]
        model.by_three.set_batch_wait_timeout_s(0.25)
        await model.by_three(7)
        assert asyncio.get_running_loop().time() == pytest.approx(0.25)
        assert (model.by_three._get_max_batch_size(), model.by_three._get_batch_wait_timeout_s()) == (2, 0.25)
        assert other.by_three._get_max_batch_size() == Model.by_three._get_max_batch_size() == 3
        assert square._get_max_batch_size() == 3

    run(scenario)


def test_limits_may_be_changed_from_a_thread_as_in_reconfigure() -> None:
    async def scenario() -> None:
        model = Model()
        tasks = [asyncio.create_task(model.by_three(n)) for n in range(2)]
        await turns()
        threading.Thread(target=model.by_three.set_max_batch_size, args=(2,)).start()
        async with asyncio.timeout(10):
            assert await asyncio.gather(*tasks) == [0, 2]

    asyncio.run(scenario())


def test_running_batches_can_be_inspected() -> None:
    async def scenario() -> None:
        model = Model()
        assert await model.double._is_batching_task_alive()
        assert model.double._get_curr_iteration_start_times() == ()
        assert await model.double._get_handling_task_stack() == ""
        model.go.clear()
        tasks = [asyncio.create_task(model.two_at_a_time(n)) for n in range(4)]
        await turns()
        times = model.two_at_a_time._get_curr_iteration_start_times()
        assert len(times) == 2
        assert all(at > 1e9 for at in times)
        stack = await model.two_at_a_time._get_handling_task_stack()
        assert "test_batched.py" in stack
        assert "two_at_a_time" in stack
        model.go.set()
        await asyncio.gather(*tasks)
        await turns()
        assert model.two_at_a_time._get_curr_iteration_start_times() == ()

    run(scenario)


# ---- BA06: cancellation


def test_a_cancelled_call_is_removed_before_its_batch_runs() -> None:
    async def scenario() -> None:
        model = Model()
        tasks = [asyncio.create_task(model.double(n)) for n in range(4)]
        await turns()
        tasks[1].cancel()
        assert await asyncio.gather(tasks[0], *tasks[2:]) == [0, 4, 6]
        assert model.batches == [[0, 2, 3]]

    run(scenario)


def test_a_running_batch_is_cancelled_only_when_all_callers_have_left() -> None:
    async def scenario() -> None:
        model = Model()
        model.go.clear()
        tasks = [asyncio.create_task(model.by_three(n)) for n in range(3)]
        await turns()
        tasks[0].cancel()
        await turns()
        model.go.set()
        assert await asyncio.gather(*tasks[1:]) == [2, 4]
        model.go.clear()
        tasks = [asyncio.create_task(model.double(n)) for n in range(3)]
        await asyncio.sleep(1)
        assert model.cleaned == []
        for task in tasks:
            task.cancel()
        await turns()
        assert model.cleaned == ["double"]

    run(scenario)


def test_many_cancellations_leave_no_state_behind() -> None:
    async def scenario() -> None:
        model = Model()

        def moody(items: list[Any]) -> Any:
            if items[0] % 5 == 0:
                raise ValueError
            return items if items[0] % 7 else items[1:]

        model.answer = moody
        for number in range(200):
            tasks = [asyncio.create_task(model.by_three(number + k)) for k in range(7)]
            tasks += [asyncio.create_task(tell(model.count_to(k + 1))) for k in range(4)]
            await turns(number % 5)
            for task in tasks[number % 2 :: 1 + number % 3]:
                task.cancel()
            model.by_three.set_batch_wait_timeout_s(0.001 * (number % 3))
            async with asyncio.timeout(100):
                await asyncio.gather(*tasks, return_exceptions=True)
        model.answer = lambda items: items
        assert await model.by_three(3) == 3
        assert await collect(model.count_to(2)) == [0, 1]
        await turns()
        assert len(asyncio.all_tasks()) == 1

    run(scenario)


# ---- BA08: sizes of one's own


def test_batch_size_fn_decides_the_size_of_batches() -> None:
    async def scenario() -> None:
        model = Model()
        assert await asyncio.gather(*(model.weighed(n) for n in (4, 5, 2, 8))) == [4, 5, 2, 8]
        assert model.batches == [[4, 5], [2, 8]]
        results = await asyncio.gather(model.weighed(11), model.weighed(items=3), return_exceptions=True)
        assert type(results[0]) is RuntimeError
        assert "The size of the item, 11 by batch_size_fn, is greater than max_batch_size" in str(results[0])
        assert results[1] == 3

    run(scenario)


# ---- BA09: whose queue


def test_instances_do_not_share_batches_and_functions_can_be_batched() -> None:
    async def scenario() -> None:
        first, second = Model(), Model()
        await asyncio.gather(first.double(1), second.double(2), first.double(3), Model.double(second, 4))
        assert (first.batches, second.batches) == ([[1, 3]], [[2, 4]])
        assert await asyncio.gather(square(2), square(3), square(4)) == [4, 9, 16]

    run(scenario)


def test_batching_does_not_keep_an_instance_alive() -> None:
    async def scenario() -> None:
        known = len(Model.double._states)
        model = Model()
        await model.double(1)
        assert await collect(model.count_to(1)) == [0]
        model.answer = lambda items: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await model.double(1)
        await turns()
        gone = weakref.ref(model)
        del model
        assert gone() is None
        assert len(Model.double._states) == known

    gc.collect()
    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()


def test_equality_hashes_and_slots_of_instances_do_not_matter() -> None:
    class Equal:
        __slots__ = ("__weakref__", "seen")
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

        @batch
        async def see(self, items: list[Any]) -> list[Any]:
            self.seen = items
            return items

    class Sealed:
        __slots__ = ()

        @batch
        async def see(self, items: list[Any]) -> list[Any]:
            return items

    async def scenario() -> None:
        first, second = Equal(), Equal()
        await asyncio.gather(first.see(1), second.see(2))
        assert (first.seen, second.seen) == ([1], [2])
        with pytest.raises(TypeError, match="__weakref__"):
            Sealed().see(1)

    run(scenario)


def test_each_event_loop_has_a_queue_which_is_dropped_with_the_loop() -> None:
    model = Model()
    for _ in range(3):
        assert asyncio.run(model.double(2)) == 4
    owner = Model.double.state_of(model)
    assert len(owner.queues()) == 1

    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(asyncio.run(model.double(n))))  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 2, 4, 6]


def test_replicas_that_share_a_function_and_a_loop_do_not_share_batches() -> None:
    seen: list[Any] = []

    @batch
    async def note(items: list[Any]) -> list[Any]:
        seen.append((serve_context.get_current_replica_tag(), items))
        return items

    def within(tag: str) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(current_replica.set, ReplicaContext("i", "b", tag))
        return context

    async def scenario() -> None:
        contexts = {tag: within(tag) for tag in ("b#A", "b#B")}
        for _ in range(3):
            tasks = [
                asyncio.create_task(note(n), context=contexts[tag]) for tag in contexts for n in range(2)
            ]
            await asyncio.gather(*tasks)
        assert seen == [("b#A", [0, 1]), ("b#B", [0, 1])] * 3

    run(scenario)


def test_replicas_that_share_a_function_and_a_loop_keep_what_their_batches_have_shown() -> None:
    @batch(batch_wait_timeout_s=1)
    async def echo(items: list[Any]) -> list[Any]:
        return items

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        replicas = [ReplicaContext("i", "b", tag, slots=lambda: (1, 8)) for tag in ("b#A", "b#B")]
        waits: list[float] = []
        for replica in replicas * 3:
            began = loop.time()
            context = contextvars.copy_context()
            context.run(current_replica.set, replica)
            await asyncio.create_task(echo(1), context=context)
            waits.append(round(loop.time() - began, 3))
        assert waits == [1, 1, 0, 0, 0, 0]

    run(scenario)


def test_batched_methods_support_inheritance_and_super() -> None:
    class Child(Model):
        @batch
        async def double(self, items: list[Any]) -> list[Any]:
            return [await asyncio.wait_for(super(Child, self).double(item), 1) + 1 for item in items]

    async def scenario() -> None:
        child = Child()
        assert await asyncio.gather(child.double(1), child.double(2)) == [3, 5]
        assert await child.by_three.__func__.call(child, Model.by_three.state_of(child), (1,), {}) == 2

    run(scenario)


# ---- the context of a batch


def test_a_batch_has_no_current_request() -> None:
    seen: list[Any] = []

    @batch(max_batch_size=2)
    async def note(items: list[Any]) -> list[Any]:
        seen.append(current_request.get())
        return items

    async def request(number: int) -> None:
        current_request.set(RequestContext(f"request-{number}"))
        await note(number)
        assert current_request.get() == RequestContext(f"request-{number}")

    async def scenario() -> None:
        await asyncio.gather(*(asyncio.create_task(request(n)) for n in range(2)))

    run(scenario)
    assert seen == [None]


# ---- BA10: batches that can never fill


def test_a_batch_that_can_never_fill_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        model = Model()
        current_replica.set(ReplicaContext("i", "a-backend", "b#A", max_ongoing_requests=5))
        await asyncio.gather(*(model.double(n) for n in range(3)))
        await model.double(1)
        model.by_three.set_batch_wait_timeout_s(0)
        await model.by_three(1)
        await model.weighed(1)
        assert len(caplog.records) == 1
        for part in ("Model.double", "'a-backend'", "runs 5 requests", "which is 10"):
            assert part in caplog.text
        model.double.set_max_batch_size(5)
        await model.double(1)
        assert len(caplog.records) == 1
        model.double.set_max_batch_size(6)
        await model.double(1)
        assert len(caplog.records) == 2

    with caplog.at_level(logging.WARNING, "daskserve.replica"):
        run(scenario)


# ---- what it passes for


def test_a_batched_function_looks_like_its_function() -> None:
    model = Model()
    for found in (Model.double, model.double, square):
        assert inspect.iscoroutinefunction(found)
        assert asyncio.iscoroutinefunction(found)
    for found in (Model.count_to, model.count_to):
        assert inspect.isasyncgenfunction(found)
        assert not inspect.iscoroutinefunction(found)
    assert list(inspect.signature(Model.combine).parameters) == ["self", "left", "right", "more", "named"]
    assert list(inspect.signature(model.combine).parameters) == ["left", "right", "more", "named"]
    assert (square.__name__, model.double.__name__) == ("square", "double")
    assert (model.double, hash(model.double)) == (model.double, hash(model.double))
    assert model.double != Model().double
    assert "Model.double" in repr(Model.double)
    assert "Model.double" in repr(model.double)


# ---- pickling


def test_an_importable_function_is_pickled_by_name() -> None:
    for value in (square, Model.double):
        assert pickle.loads(pickle.dumps(value)) is value
        assert cloudpickle.loads(cloudpickle.dumps(value)) is value
    model = pickle.loads(pickle.dumps(Empty()))
    assert asyncio.run(pickle.loads(pickle.dumps(model.see))(1)) == 1


class Empty:
    @batch
    async def see(self, items: list[Any]) -> list[Any]:
        return items


SOURCE = """
import daskserve as serve

class Local:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.5, batch_size_fn=len)
    async def double(self, items):
        return [[2 * item, len(items)] for item in items]

@serve.batch(max_batch_size=2)
async def triple(items):
    return [3 * item for item in items]
"""


def test_a_function_that_cannot_be_imported_is_pickled_by_value_even_after_use() -> None:
    module = types.ModuleType("__main__")
    exec(SOURCE, module.__dict__)

    async def use() -> list[Any]:
        await asyncio.gather(module.Local().double(1), module.triple(1))
        return [cloudpickle.dumps(module.Local), cloudpickle.dumps(module.triple)]

    data = asyncio.run(use())
    # As in another process that has never used the class.
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    loaded, triple = (pickle.loads(each) for each in data)
    assert loaded is not module.Local
    assert isinstance(triple, BatchedFunction)
    assert loaded.double._get_batch_wait_timeout_s() == 0.5

    async def again() -> None:
        model = loaded()
        assert await asyncio.gather(model.double(1), loaded.double(model, 2)) == [[2, 2], [4, 2]]
        assert await triple(3) == 9

    asyncio.run(again())


def test_functions_of_a_module_registered_for_pickling_by_value_are_pickled_by_value() -> None:
    module = types.ModuleType("by_value_module")
    module.__dict__["__name__"] = "by_value_module"
    exec(SOURCE, module.__dict__)
    sys.modules["by_value_module"] = module
    try:
        assert b"by_value_module" in pickle.dumps(module.triple)
        cloudpickle.register_pickle_by_value(module)
        try:
            data = cloudpickle.dumps(module.triple)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    finally:
        del sys.modules["by_value_module"]
    assert asyncio.run(pickle.loads(data)(2)) == 6


def test_a_refused_option_of_a_batch_says_what_it_may_be() -> None:
    with pytest.raises(ValueError, match="at least 0 s and finite, got inf"):
        batch(batch_wait_timeout_s=float("inf"))
    for sizes in (3, "8"):
        with case(sizes), pytest.raises(TypeError, match="must be a list of whole numbers; got"):
            batch(preferred_batch_sizes=sizes)  # type: ignore[call-overload]
