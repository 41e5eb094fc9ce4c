"""``continuous_batch``: requests join and leave between steps, without a replica."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from tables import case, each_case

from daskserve.common.clock import seeded_rng
from daskserve.data.batching.continuous.decorator import continuous_batch
from daskserve.data.batching.continuous.engine import Engine, stream
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.continuous.rounds import Rounds
from daskserve.data.batching.continuous.slots import SlotLimits, Slots
from daskserve.data.batching.stream import MAX_BUFFERED_RESULTS
from daskserve.errors import (
    BackPressureError,
    BadRequestError,
    RequestTimeoutError,
    ServeError,
    StepError,
    UnavailableError,
    UserCodeError,
)
from daskserve.telemetry.replica import StepMetrics
from daskserve.testing import run_virtual

STEP_S = 0.1


class Model:
    """Counts up to the first argument of each call. Records steps, and prepared and released requests."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self.prefilled: list[list[Any]] = []
        self.released: list[list[Any]] = []
        self.held: dict[int, Any] = {}
        self.answer: Callable[[list[ActiveRequest]], Any] = lambda active: [
            len(each.outputs) for each in active
        ]
        self.prepare: Callable[[list[ActiveRequest]], Any] = lambda new: None
        self.take: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(STEP_S)

    @continuous_batch(max_slots=3)
    async def count(self, active: list[ActiveRequest]) -> Any:
        return await self._step(active)

    @count.prefill
    async def _prefill(self, new: list[ActiveRequest]) -> Any:
        return self._hold(new)

    @count.release
    def _release(self, left: list[ActiveRequest]) -> None:
        self._free(left)

    async def _step(self, active: list[ActiveRequest]) -> Any:
        self.steps.append([each.args[0] for each in active])
        assert [self.held[each.slot] for each in active] == [each.args[0] for each in active]
        await self.take()
        for each in active:
            if len(each.outputs) + 1 >= each.args[0]:
                each.finish()
        return self.answer(active)

    def _hold(self, new: list[ActiveRequest]) -> Any:
        self.prefilled.append([(each.args[0], len(each.outputs)) for each in new])
        states = self.prepare(new)
        for each in new:
            assert each.slot not in self.held
            self.held[each.slot] = each.args[0]
        return states

    def _free(self, left: list[ActiveRequest]) -> None:
        self.released.append([each.args[0] for each in left])
        for each in left:
            self.held.pop(each.slot, None)


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def outcomes(*streams: AsyncIterator[Any]) -> list[Any]:
    return await asyncio.gather(*(collect(each) for each in streams), return_exceptions=True)


def run(scenario: Callable[[Model], Awaitable[None]]) -> None:
    async def main() -> None:
        model = Model()
        await scenario(model)
        await asyncio.sleep(2 * STEP_S)
        assert model.held == {}
        at_rest(model.count)

    run_virtual(main)


def at_rest(function: Any) -> None:
    stats = function.stats()
    assert (stats.active, stats.queued, stats.active_cost, stats.queued_cost) == (0, 0, 0, 0)


# ---- joining and leaving


def test_requests_join_and_leave_between_steps() -> None:
    async def scenario(model: Model) -> None:
        results = await outcomes(*(model.count(n) for n in (1, 2, 3, 4)))
        assert results == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert model.steps == [[1, 2, 3], [2, 3, 4], [3, 4], [4], [4]]
        assert model.prefilled == [[(1, 0), (2, 0), (3, 0)], [(4, 0)]]
        assert model.released == [[1], [2], [3], [4]]
        stats = model.count.stats()
        assert (stats.steps, stats.outputs) == (5, 10)

    run(scenario)


def test_each_caller_gets_an_output_as_soon_as_its_step_has_ended() -> None:
    async def scenario(model: Model) -> None:
        loop = asyncio.get_running_loop()
        times = [loop.time() async for _ in model.count(3)]
        assert times == pytest.approx([STEP_S, 2 * STEP_S, 3 * STEP_S])

    run(scenario)


def test_a_caller_that_leaves_frees_its_slot_before_the_next_step() -> None:
    async def scenario(model: Model) -> None:
        first, second = model.count(1000), asyncio.create_task(collect(model.count(1001)))
        await anext(first)
        second.cancel()
        await first.aclose()
        assert await collect(model.count(1)) == [0]
        assert model.steps == [[1000, 1001], [1]]
        await asyncio.sleep(0)
        assert sorted(itertools.chain(*model.released)) == [1, 1000, 1001]

    run(scenario)


def test_a_step_without_waiting_requests_is_cancelled() -> None:
    async def scenario(model: Model) -> None:
        model.take = lambda: asyncio.sleep(1e4)
        task = asyncio.create_task(collect(model.count(5)))
        await asyncio.sleep(1)
        task.cancel()
        model.take = lambda: asyncio.sleep(STEP_S)
        assert await collect(model.count(1)) == [0]
        assert asyncio.get_running_loop().time() < 2

    run(scenario)


def test_a_request_that_times_out_leaves() -> None:
    async def scenario(model: Model) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect(model.count(1000)), 1.05)
        assert len(model.steps) <= 11

    run(scenario)


# ---- results


def test_errors_and_none_may_replace_an_output() -> None:
    broken = ValueError("broken")

    def answer(active: list[ActiveRequest]) -> list[Any]:
        special = {101: StopIteration, 102: broken, 103: None, 104: int, 105: StopAsyncIteration()}
        return [special.get(each.args[0], 7) if len(model_steps) > 1 else 1 for each in active]

    model_steps: list[Any] = []
    for number, expected in ((101, [1]), (102, broken), (105, [1])):

        async def scenario(model: Model, number: int = number, expected: Any = expected) -> None:
            nonlocal model_steps
            model_steps, model.answer = model.steps, answer
            assert await outcomes(model.count(number), model.count(2)) == [expected, [1, 7]]

        with case(number):
            run(scenario)

    async def nothing(model: Model) -> None:
        nonlocal model_steps
        model_steps, model.answer = model.steps, answer
        stream = model.count(103)
        assert await anext(stream) == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 1)
        assert await collect(model.count(1)) == [7]

    run(nothing)


@each_case("results", [None, "ab", [1], [1, 2, 3], {1: 2, 3: 4}, 5])
def test_anything_but_one_output_per_request_fails_the_step(results: Any) -> None:
    async def scenario(model: Model) -> None:
        model.answer = lambda active: results
        assert [type(each) for each in await outcomes(model.count(5), model.count(6))] != [list, list]
        model.answer = lambda active: [0] * len(active)
        assert await collect(model.count(1)) == [0]

    run(scenario)


def test_too_many_outputs_end_a_request() -> None:
    class Endless:
        @continuous_batch(max_outputs=5)
        async def resume(self, active: list[ActiveRequest]) -> list[int]:
            return [1] * len(active)

    async def main() -> None:
        stream = Endless().resume(1)
        assert [await anext(stream) for _ in range(5)] == [1] * 5
        with pytest.raises(ServeError, match="max_outputs"):
            await anext(stream)

    run_virtual(main)


# ---- errors


def test_a_step_that_raises_ends_its_requests_and_no_others() -> None:
    async def scenario(model: Model) -> None:
        def answer(active: list[ActiveRequest]) -> Any:
            if len(model.steps) == 2:
                raise RuntimeError("the model is broken")
            return [1 for _ in active]

        model.answer = answer
        found = await outcomes(*(model.count(n) for n in (5, 6, 7, 1)))
        assert [str(each) for each in found[:3]] == ["the model is broken"] * 3
        assert found[3] == [1]

    run(scenario)


def test_an_error_that_names_requests_ends_only_these() -> None:
    async def scenario(model: Model) -> None:
        def answer(active: list[ActiveRequest]) -> Any:
            named = [each for each in active if each.args[0] == 6]
            if named:
                raise StepError("6 is bad", requests=named)
            return [1 for _ in active]

        model.answer = answer
        found = await outcomes(*(model.count(n) for n in (2, 6, 3)))
        assert found[0] == [1, 1]
        assert found[2] == [1, 1, 1]
        assert type(found[1]) is StepError
        assert (str(found[1]), found[1].requests) == ("6 is bad", ())
        assert pickle.loads(pickle.dumps(found[1])).args == ("6 is bad",)

    run(scenario)


@each_case("error", [StepError("none"), StepError("others", requests=[ActiveRequest()]), SystemExit(3)])
def test_an_error_that_names_no_request_ends_all_requests_of_the_step(error: BaseException) -> None:
    async def scenario(model: Model) -> None:
        def answer(active: list[ActiveRequest]) -> Any:
            raise error

        model.answer = answer
        found = await outcomes(model.count(2), model.count(3))
        assert {type(each) for each in found} <= {StepError, UserCodeError}

    run(scenario)


def test_an_error_of_prefill_ends_the_new_requests() -> None:
    async def scenario(model: Model) -> None:
        def prepare(new: list[ActiveRequest]) -> Any:
            if len(model.prefilled) == 2:
                raise RuntimeError("bad prompt")
            return [ValueError("own") if each.args[0] == 13 else None for each in new]

        model.prepare = prepare
        running = asyncio.create_task(collect(model.count(4)))
        await asyncio.sleep(1.5 * STEP_S)
        assert str((await outcomes(model.count(2)))[0]) == "bad prompt"
        own, other = await outcomes(model.count(13), model.count(1))
        assert (str(own), other) == ("own", [0])
        assert await running == [0, 1, 2, 3]

    run(scenario)


def test_an_error_of_release_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Leaky:
        @continuous_batch
        async def one(self, active: list[ActiveRequest]) -> list[Any]:
            for each in active:
                each.finish()
            return [1] * len(active)

        @one.release
        def _release(self, left: list[ActiveRequest]) -> None:
            raise OSError("cannot free")

    async def main() -> None:
        leaky = Leaky()
        assert await collect(leaky.one()) == [1]
        assert await collect(leaky.one()) == [1]
        await asyncio.sleep(0.1)

    run_virtual(main)
    assert "cannot free" in caplog.text


class Late(Model):
    @continuous_batch(max_slots=1, step_timeout_s=5)
    async def count(self, active: list[ActiveRequest]) -> Any:
        return await self._step(active)

    @count.prefill
    def _prefill(self, new: list[ActiveRequest]) -> Any:
        return self._hold(new)

    @count.release
    def _release(self, left: list[ActiveRequest]) -> None:
        self._free(left)


@each_case("is_stubborn", [False, True])
def test_a_step_that_hangs_fails_its_requests_and_those_that_wait(is_stubborn: bool) -> None:
    async def main() -> None:
        model = Late()
        loop = asyncio.get_running_loop()

        async def hang() -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                if not is_stubborn:
                    raise
                await asyncio.sleep(100)

        model.take = hang
        found = await outcomes(model.count(1), model.count(2))
        assert [type(each) for each in found] == [RequestTimeoutError, UnavailableError]
        assert 5 <= loop.time() <= 10
        model.take = lambda: asyncio.sleep(STEP_S)
        if is_stubborn:  # this request cannot be cancelled
            assert model.count.stats().running_s >= 5
            assert [type(each) for each in await outcomes(model.count(1))] == [UnavailableError]
            await asyncio.sleep(101)
        assert await collect(model.count(100)) == list(range(100))
        await asyncio.sleep(STEP_S)
        assert model.held == {}
        at_rest(model.count)
        assert model.count.stats().running_s == 0

    run_virtual(main)


def test_user_code_may_change_its_list_and_return_any_object() -> None:
    class Odd:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise OSError("no class")

    odd = Odd()

    async def scenario(model: Model) -> None:
        def answer(active: list[ActiveRequest]) -> Any:
            count = len(active)
            active.clear()
            return [odd] * count

        model.answer = answer
        first, second = await outcomes(model.count(1), model.count(2))
        assert first[0] is odd
        assert len(second) == 2

    run(scenario)


def test_each_caller_gets_the_traceback_of_the_error_alone() -> None:
    async def scenario(model: Model) -> None:
        def answer(active: list[ActiveRequest]) -> Any:
            raise RuntimeError("broken")

        model.answer = answer
        depths = []

        async def caller() -> None:
            try:
                await collect(model.count(1))
            except RuntimeError as error:
                depths.append(len(traceback.extract_tb(error.__traceback__)))

        await asyncio.gather(*(caller() for _ in range(3)))
        assert len(set(depths)) == 1

    run(scenario)


# ---- slots, budget, priorities, users


def test_calls_wait_for_slots_up_to_a_limit() -> None:
    class Small(Model):
        @continuous_batch(max_slots=1, max_queued=1, priority_fn=lambda n, level=0: level)
        async def count(self, active: list[ActiveRequest]) -> Any:
            await self.take()
            for each in active:
                if len(each.outputs) + 1 >= each.args[0]:
                    each.finish()
            return self.answer(active)

    async def main() -> None:
        model = Small()
        found = await outcomes(*(model.count(2) for _ in range(3)))
        assert found[:2] == [[0, 1]] * 2
        assert isinstance(found[2], BackPressureError)
        # A call of a higher priority replaces the newest waiting call.
        found = await outcomes(model.count(2), model.count(2), model.count(2, level=1))
        assert sorted(str(type(each).__name__) for each in found) == ["BackPressureError", "list", "list"]
        assert found[2] == [0, 1]
        model.count.set_max_slots(2)
        assert await outcomes(*(model.count(2) for _ in range(3))) == [[0, 1]] * 3
        at_rest(model.count)

    run_virtual(main)


def test_a_preempted_request_is_not_refused_and_does_not_count_in_the_queue() -> None:
    def request(priority: float) -> ActiveRequest:
        made = ActiveRequest()
        made.priority = priority
        return made

    slots = Slots(SlotLimits(max_slots=2, max_queued=1))
    first, preempted, new, urgent = (request(each) for each in (1, 0, 0, 1))
    for each in (first, preempted):
        slots.add(each)
    assert slots.admit() == [first, preempted]
    slots.preempt(preempted)
    assert slots.add(new) is None  # one may wait, besides the preempted request
    assert slots.add(urgent) is new
    with pytest.raises(BackPressureError):
        slots.add(request(1))
    slots.end(first)
    assert slots.admit() == [urgent, preempted]
    assert (slots.queued, slots._returning) == (0, 0)


def test_the_budget_bounds_what_runs_and_preempts_the_newest() -> None:
    class Budgeted(Model):
        @continuous_batch(max_slots=10, max_cost=20, cost_fn=lambda count, tokens: tokens)
        async def count(self, active: list[ActiveRequest]) -> Any:
            assert sum(each.cost + 1 for each in active) <= 20
            return await self._step(active)

        @count.prefill
        def _prefill(self, new: list[ActiveRequest]) -> Any:
            return self._hold(new)

        @count.release
        def _release(self, left: list[ActiveRequest]) -> None:
            self._free(left)

    async def main() -> None:
        model = Budgeted()
        found = await outcomes(model.count(8, 5), model.count(7, 5), model.count(3, 8), model.count(2, 1))
        assert found == [list(range(n)) for n in (8, 7, 3, 2)]
        assert model.steps[0] == [8, 7]  # a third request would not fit in the next step
        assert model.prefilled[0] == [(8, 0), (7, 0)]
        # 8 and 7 would need 13 and 12 in the end, so 7 is preempted, and continues after its outputs. Later,
        # 3 is preempted, too.
        assert (7, 5) in itertools.chain(*model.prefilled)
        assert model.count.stats().preemptions == 2
        assert model.held == {}
        (too_large,) = await outcomes(model.count(1, 20))
        assert isinstance(too_large, BadRequestError)
        (grown,) = await outcomes(model.count(100, 10))
        assert isinstance(grown, BadRequestError)
        await asyncio.sleep(1)
        at_rest(model.count)

    run_virtual(main)


@each_case("where", ["step", "result", "prefill", "state"])
def test_a_request_that_finds_no_memory_waits_and_continues_later(where: str) -> None:
    async def scenario(model: Model) -> None:
        most = 2

        def answer(active: list[ActiveRequest]) -> Any:
            outputs: list[Any] = [len(each.outputs) for each in active]
            if len(active) > most and where == "step":
                raise MemoryError
            if len(active) > most and where == "result":
                outputs[-1] = MemoryError()
            return outputs

        def prepare(new: list[ActiveRequest]) -> Any:
            if len(model.held) + len(new) > most and where == "prefill":
                raise MemoryError
            room = most - len(model.held)
            return [MemoryError() if n >= room and where == "state" else n for n, _ in enumerate(new)]

        model.answer, model.prepare = answer, prepare
        model._release = None  # type: ignore[assignment, method-assign]
        assert await outcomes(*(model.count(n) for n in (3, 4, 5))) == [list(range(n)) for n in (3, 4, 5)]
        assert model.count.stats().preemptions == 1

    run(scenario)


def test_a_request_that_finds_no_memory_alone_fails() -> None:
    async def scenario(model: Model) -> None:
        def answer(active: list[ActiveRequest]) -> Any:
            raise MemoryError("12 GiB")

        model.answer = answer
        found = await outcomes(*(model.count(n) for n in (3, 4, 5)))
        assert [type(each) for each in found] == [MemoryError] * 3

    run(scenario)


class Shared:
    def __init__(self) -> None:
        self.order: list[Any] = []

    @continuous_batch(
        max_slots=1,
        user_fn=lambda user, **_: user,
        priority_fn=lambda user, level=0, **_: level,
        cost_fn=lambda user, **_: 1e6 if user == "a" else 0.0,  # shares count steps, not costs
    )
    async def one(self, active: list[ActiveRequest]) -> list[Any]:
        self.order.append((active[0].args[0], active[0].priority))
        await asyncio.sleep(STEP_S)
        active[0].finish()
        return [0]


def test_users_take_turns_and_higher_priorities_go_first() -> None:
    async def main() -> None:
        model = Shared()
        calls = [*(("a", 0) for _ in range(4)), ("b", 0), ("b", 0), ("c", 5)]
        await outcomes(*(model.one(user, level=level) for user, level in calls))
        assert "".join(user for user, _ in model.order) == "cababaa"
        at_rest(model.one)

    run_virtual(main)


# ---- slow callers, resumed calls


def test_a_caller_that_does_not_read_is_left_out_until_it_does() -> None:
    async def scenario(model: Model) -> None:
        model.take = lambda: asyncio.sleep(0)
        stream = model.count(3 * MAX_BUFFERED_RESULTS)
        await anext(stream)
        other = await collect(model.count(2 * MAX_BUFFERED_RESULTS))
        assert len(other) == 2 * MAX_BUFFERED_RESULTS
        assert sum(3 * MAX_BUFFERED_RESULTS in step for step in model.steps) <= MAX_BUFFERED_RESULTS + 1
        assert len(await collect(stream)) == 3 * MAX_BUFFERED_RESULTS - 1

    run(scenario)


class Driven(Engine):
    """An engine whose steps the test makes, in place of the thread."""

    def _wake(self) -> None: ...

    def step(self) -> list[ActiveRequest]:
        """Make the next step, with an output for each request in it; return these requests."""
        call = self.rounds.next_call()
        if call is None:
            return []
        self.rounds.note(call, ([1] * len(call[1]), None), 0.0)
        for each in self.rounds.take_woken():
            assert each.waiter is not None
            each.waiter.set_result(None)
            each.waiter = None
        return call[1]


def driven(step: Any = len) -> Driven:
    rounds = Rounds("f", Slots(SlotLimits(max_slots=2)), StepMetrics(), max_outputs=10**6, has_prefill=False)
    return Driven(rounds, {"step": step}, None)


async def test_an_answer_that_computes_while_it_is_read_holds_up_no_requests() -> None:
    engine = driven(lambda active: (engine.rounds._lock.locked() for _ in active))
    assert engine._answer_plain("step", [ActiveRequest()], ()) == ([False], None)


def test_a_request_that_resumes_while_a_thread_chooses_the_step_is_not_lost() -> None:
    class Slow(list[ActiveRequest]):
        """A list that resumes a request on the loop while it is read."""

        def __iter__(self) -> Iterator[ActiveRequest]:
            yield from super().__iter__()
            if not loop_thread.is_alive() and slow.is_paused:
                loop_thread.start()
                loop_thread.join(0.01)

    async def main() -> None:
        nonlocal loop_thread
        engine = driven()
        for each in (slow, other):
            engine.add(each)
        assert engine.step() == [slow, other]
        engine.rounds.resume(slow)  # looks again for what takes part
        slow.is_paused = True
        loop_thread = threading.Thread(target=engine.rounds.resume, args=(slow,))
        engine.rounds.slots.active = Slow(engine.rounds.slots.active)
        engine.step()
        loop_thread.join()
        assert engine.step() == [slow, other]

    slow, other = ActiveRequest(), ActiveRequest()
    loop_thread = threading.Thread()
    run_virtual(main)


def test_a_request_that_is_paused_after_its_caller_has_read_all_continues() -> None:
    async def main() -> None:
        engine, request = driven(), ActiveRequest()
        outputs = stream(lambda: (engine, request))
        for _ in range(2):
            reading = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            assert engine.step() == [request]
            assert await reading == 1
            engine.rounds.resume(request)  # looks again for what takes part
            request.is_paused = True

    run_virtual(main)


def test_a_call_can_continue_where_another_one_has_ended() -> None:
    async def scenario(model: Model) -> None:
        assert await collect(model.count(5, resume_from=[0, 1, 2])) == [3, 4]
        assert model.prefilled == [[(5, 3)]]

    run(scenario)


# ---- plain functions, in a thread


class Plain:
    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.left: list[Any] = []
        self.can_go = threading.Event()
        self.can_go.set()

    @continuous_batch(max_slots=2)
    def count(self, active: list[ActiveRequest]) -> list[Any]:
        self.threads.add(threading.get_ident())
        self.can_go.wait(10)
        for each in active:
            if len(each.outputs) + 1 >= each.args[0]:
                each.finish()
        return [each.state + len(each.outputs) for each in active]

    @count.prefill
    def _prefill(self, new: list[ActiveRequest]) -> list[Any]:
        return [100 * each.args[0] for each in new]

    @count.release
    def _release(self, left: list[ActiveRequest]) -> None:
        self.left += [each.args[0] for each in left]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.001)


async def use_plain_model() -> tuple[weakref.ref[Plain], set[int]]:
    model = Plain()
    results = await outcomes(*(model.count(n) for n in (3, 1, 2, 400)))
    assert results == [[100 * n + i for i in range(n)] for n in (3, 1, 2, 400)]
    model.can_go.clear()
    stuck = asyncio.create_task(anext(model.count(10**6)))
    await until(lambda: model.count.stats().active == 1)
    stuck.cancel()
    waiting = asyncio.create_task(collect(model.count(1)))
    await asyncio.sleep(0)
    model.can_go.set()
    assert await waiting == [100]
    await until(lambda: sorted(model.left) == [1, 1, 2, 3, 400, 10**6])
    assert len(model.threads) == 1
    assert model.threads != {threading.get_ident()}
    at_rest(model.count)
    return weakref.ref(model), model.threads


def test_plain_functions_run_in_one_thread_beside_the_loop() -> None:
    async def main() -> None:
        ref, threads = await use_plain_model()
        # The sleeping thread ends with the object.
        await until(lambda: ref() is None)
        await until(lambda: not threads & {each.ident for each in threading.enumerate()})

    asyncio.run(main())


# ---- definition


def test_functions_and_pickled_classes_work() -> None:
    @continuous_batch
    async def one(active: list[ActiveRequest]) -> list[Any]:
        for each in active:
            each.finish()
        return [each.args[0] for each in active]

    class Local(Plain):
        @continuous_batch(max_slots=2)
        def twice(self, active: list[ActiveRequest]) -> list[Any]:
            for each in active:
                each.finish()
            return [2 * each.args[0] for each in active]

    async def main() -> None:
        assert await collect(one(5)) == [5]
        copy = cloudpickle.loads(cloudpickle.dumps(Local))()
        assert await collect(copy.twice(5)) == [10]
        assert await collect(cloudpickle.loads(cloudpickle.dumps(one))(6)) == [6]

    asyncio.run(main())
    assert pickle.loads(pickle.dumps(Plain.count)) is Plain.count
    assert inspect.isasyncgenfunction(Plain.count)
    assert inspect.isasyncgenfunction(Plain().count)
    assert str(inspect.signature(Plain().count)) == "(*args: 'Any', **kwargs: 'Any')"


@each_case(
    "options, error",
    [
        ({"max_slots": 0}, ValueError),
        ({"max_slots": 1.5}, TypeError),
        ({"max_queued": -1}, ValueError),
        ({"max_queued": "many"}, TypeError),
        ({"max_cost": -1}, ValueError),
        ({"max_cost": float("nan")}, ValueError),
        ({"cost_per_step": -1}, ValueError),
        ({"cost_fn": 5}, TypeError),
        ({"priority_fn": 5}, TypeError),
        ({"user_fn": collect}, TypeError),
        ({"max_outputs": 0}, ValueError),
        ({"step_timeout_s": 0}, ValueError),
        ({"step_timeout_s": "1"}, TypeError),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        continuous_batch(**options)


def test_wrong_functions_are_refused() -> None:
    async def generator(active: list[Any]) -> AsyncIterator[Any]:
        yield active

    for wrong in (5, Plain, generator):
        with case(wrong), pytest.raises(TypeError, match="step function"):
            continuous_batch(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="both plain"):

        class Mixed:
            @continuous_batch
            def step(self, active: list[Any]) -> list[Any]:
                return active

            @step.prefill
            async def prefill(self, new: list[Any]) -> list[Any]:
                return new


@each_case("name, value", [("cost_fn", "x"), ("cost_fn", -1), ("priority_fn", float("nan")), ("user_fn", [])])
def test_wrong_values_of_the_functions_of_a_call_reach_its_caller(name: str, value: Any) -> None:
    @continuous_batch(**{name: lambda *args: value})
    async def one(active: list[ActiveRequest]) -> list[Any]:
        return [StopIteration] * len(active)

    async def main() -> None:
        with pytest.raises((TypeError, ValueError), match=name):
            await collect(one(1))
        at_rest(one)

    run_virtual(main)


# ---- anything in any order


@pytest.mark.parametrize("seed", range(3))
def test_after_random_joins_leaves_and_errors_nothing_is_left(seed: int) -> None:
    rng = seeded_rng(seed)

    class Fuzzed(Model):
        @continuous_batch(
            max_slots=4,
            max_queued=20,
            max_cost=60,
            cost_fn=lambda n, **_: n,
            user_fn=lambda n, user, **_: user,
            priority_fn=lambda n, level, **_: level,
        )
        async def count(self, active: list[ActiveRequest]) -> Any:
            return await self._step(active)

        @count.prefill
        def _prefill(self, new: list[ActiveRequest]) -> Any:
            return self._hold(new)

        @count.release
        def _release(self, left: list[ActiveRequest]) -> None:
            self._free(left)

    def answer(active: list[ActiveRequest]) -> Any:
        if rng.random() < 0.02:
            raise rng.choice([MemoryError(), RuntimeError(), StepError("one", requests=active[:1])])
        outputs: list[Any] = [len(each.outputs) for each in active]
        if rng.random() < 0.05:
            outputs[0] = rng.choice([MemoryError(), ValueError(), StopIteration, None])
        return outputs

    def prepare(new: list[ActiveRequest]) -> Any:
        if rng.random() < 0.02:
            raise rng.choice([MemoryError(), RuntimeError(), StepError("one", requests=new[:1])])

    async def caller(model: Model) -> str:
        n = rng.randrange(1, 30)
        read: list[int] = []
        await asyncio.sleep(rng.random() * 60)
        try:
            async with asyncio.timeout(rng.choice([0.05, 1, 10, 1000])):
                async for each in model.count(n, user=rng.randrange(3), level=rng.randrange(2)):
                    read.append(each)
                    if rng.random() < 0.01:
                        return "left"
        except (BackPressureError, TimeoutError, RuntimeError, ValueError, MemoryError, StepError) as error:
            return type(error).__name__
        finally:
            assert read == sorted(set(read))  # a preemption neither loses nor repeats outputs
        return "done"

    async def main() -> None:
        model = Fuzzed()
        model.answer, model.prepare = answer, prepare
        ends = await asyncio.gather(*(caller(model) for _ in range(100)))
        await asyncio.sleep(1)
        assert set(ends) > {"done", "TimeoutError"}
        assert model.held == {}
        at_rest(model.count)
        assert model.count.stats().preemptions

    run_virtual(main)
