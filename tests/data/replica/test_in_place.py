"""User code in the task of its request must behave as if it had a separate task."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

from daskserve.context import RequestContext, current_request
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.runner import CodeRun
from daskserve.errors import ActorLostError, ClosedError, UserCodeError
from daskserve.payload.packed_errors import PackedError
from daskserve.testing import VirtualTimeLoop

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Entered:
    """Code that was entered in the current task, to be awaited there."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._value: Any = None
        self._error: Exception | None = None
        self._abort_error: Exception | None = None
        self.run: CodeRun | None = None

    def run_ended(self, value: Any, error: Exception | None) -> None:
        self._desk.freed += 1
        self._value, self._error = value, error

    def run_aborted(self, error: Exception) -> None:
        self._abort_error = error

    def wait(self) -> Entered:
        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        if self.run is not None:
            driving = self.run.drive()
            assert driving is not None
            yield from driving.__await__()
        error = self._abort_error or self._error
        if error is not None:
            raise error
        return self._value


class Desk:
    """A fake executor that records its runs."""

    def __init__(self) -> None:
        self.executor = UserExecutor("b#AAAAAA", contextvars.copy_context(), event_loop="worker")
        self.freed = 0
        self.notes: list[Any] = []

    def begin(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Entered:
        self.request = RequestContext("an-id")
        context = self.executor.context.copy()
        context.run(current_request.set, self.request)
        entered = Entered(self)
        entered.run = self.executor.enter(function, args, context, entered)
        return entered

    def task(self, function: Callable[..., Awaitable[Any]], *args: Any) -> asyncio.Task[Any]:
        async def carry() -> Any:
            return await self.begin(function, *args).wait()

        return asyncio.create_task(carry())


def run(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        await scenario(desk)
        assert desk.executor.runs == set()
        await desk.executor.close(1)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def test_it_returns_what_the_code_returns_with_and_without_waiting() -> None:
    async def at_once(number: int) -> int:
        return number

    async def later(number: int) -> int:
        await asyncio.sleep(3)
        return number + await at_once(1)

    async def scenario(desk: Desk) -> None:
        assert await desk.begin(at_once, 7).wait() == 7
        assert desk.freed == 1
        assert await desk.begin(later, 7).wait() == 8
        assert desk.freed == 2

    run(scenario)


def test_code_runs_in_a_context_of_its_own_and_leaves_no_trace() -> None:
    async def code() -> tuple[Any, str]:
        WHO.set("the code")
        await asyncio.sleep(1)
        request = current_request.get()
        return request, WHO.get()

    async def scenario(desk: Desk) -> None:
        WHO.set("the caller")
        assert await desk.begin(code).wait() == (desk.request, "the code")
        assert (current_request.get(), WHO.get()) == (None, "the caller")

    run(scenario)


def test_errors_are_the_codes_own_and_ends_of_the_process_are_not() -> None:
    async def wrong() -> None:
        await asyncio.sleep(1)
        raise KeyError("k")

    async def leaving() -> None:
        raise SystemExit(3)

    async def scenario(desk: Desk) -> None:
        with pytest.raises(PackedError, match="KeyError: 'k'"):
            await desk.begin(wrong).wait()
        with pytest.raises(PackedError, match="SystemExit: 3") as caught:
            await desk.begin(leaving).wait()
        assert isinstance(caught.value.known, UserCodeError)
        assert desk.freed == 2

    run(scenario)


def test_a_cancellation_reaches_the_code_and_then_the_caller() -> None:
    async def code(desk: Desk) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            desk.notes.append("cleaned up")

    async def scenario(desk: Desk) -> None:
        task = desk.task(code, desk)
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (desk.notes, desk.freed) == (["cleaned up"], 1)

    run(scenario)


def test_calls_of_the_code_are_cancelled_after_the_code_itself() -> None:
    async def code(desk: Desk) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            desk.notes.append(desk.request._is_cancelled)
            raise

    async def scenario(desk: Desk) -> None:
        task = desk.task(code, desk)
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert (desk.notes, desk.request._is_cancelled) == ([False], True)

    run(scenario)


@pytest.mark.parametrize("by_timeout", [False, True])
def test_tasks_that_code_cancels_itself_do_not_cancel_its_calls(by_timeout: bool) -> None:
    async def code() -> None:
        if by_timeout:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await asyncio.sleep(60)
            return
        helper = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(1)
        helper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await helper

    async def scenario(desk: Desk) -> None:
        await desk.task(code)
        assert not desk.request._is_cancelled

    run(scenario)


def test_code_that_continues_in_spite_of_it_keeps_its_slot_until_it_ends() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        return "done all the same"

    async def scenario(desk: Desk) -> None:
        task = desk.task(stubborn)
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.sleep(4)
        assert desk.freed == 0
        assert await task == "done all the same"
        assert (desk.freed, asyncio.get_running_loop().time()) == (1, 6)

    run(scenario)


def test_a_cancellation_that_the_code_made_up_is_an_error_of_the_code() -> None:
    async def code() -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost

    async def scenario(desk: Desk) -> None:
        with pytest.raises(PackedError, match="CancelledError"):
            await desk.begin(code).wait()

    run(scenario)


@pytest.mark.parametrize("waits_for_nothing", [False, True])
def test_abort_ends_the_code_and_the_caller_gets_the_reason(waits_for_nothing: bool) -> None:
    async def code() -> None:
        while True:  # noqa: ASYNC110 - the test stops it
            await asyncio.sleep(0 if waits_for_nothing else 60)

    async def scenario(desk: Desk) -> None:
        task = desk.task(code)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        desk.executor.abort_runs(ActorLostError("stopped"))
        with pytest.raises(ActorLostError, match="stopped"):
            await task
        assert (desk.freed, task.cancelling()) == (1, 0)

    run(scenario)


def test_a_loop_that_is_given_up_closes_the_code() -> None:
    async def code(desk: Desk) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            desk.notes.append("closed")

    async def scenario(desk: Desk) -> None:
        waiting = desk.begin(code, desk).__await__()
        next(waiting)
        waiting.close()
        assert (desk.notes, desk.freed) == (["closed"], 1)

    run(scenario)


def test_code_that_never_waits_is_no_run_and_may_not_cancel_itself() -> None:
    async def code(desk: Desk) -> str:
        desk.notes.append(len(desk.executor.runs))
        return "done"

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def scenario(desk: Desk) -> None:
        entered = desk.begin(code, desk)
        assert (entered.run, desk.notes, desk.freed) == (None, [0], 1)
        assert await entered == "done"
        with pytest.raises(PackedError, match="CancelledError"):
            await desk.begin(cancelled).wait()

    run(scenario)


def test_a_cancellation_of_the_task_before_the_code_waits_is_the_tasks_own() -> None:
    async def cancels_its_task() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        raise asyncio.CancelledError

    async def scenario(desk: Desk) -> None:
        task = desk.task(cancels_its_task)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert desk.freed == 0  # what could not be started is not told of

    run(scenario)


def test_after_the_executor_is_closed_nothing_begins() -> None:
    async def code() -> None: ...

    async def scenario(desk: Desk) -> None:
        await desk.executor.close(1)
        with pytest.raises(ClosedError):
            desk.begin(code)

    run(scenario)
