"""The executor: where code runs, messages between threads, and leftovers of code that does not end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import anyio.to_thread
import pytest
from runs import run, start_async, start_sync, until

from daskserve.data.replica.execution.evidence import BLOCKED_AFTER_S, WATCH_INTERVAL_S
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.loop_watch import LoopWatch, SharedLoopWatch
from daskserve.data.replica.execution.runner import RunResult
from daskserve.data.replica.health import probe_liveness
from daskserve.errors import ClosedError, UserCodeError
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.payload.packed_errors import PackedError

DEADLINE_S = 10.0


def test_a_post_that_fails_is_logged_and_does_not_take_others_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        after = asyncio.Event()
        thread_calls = ThreadCalls(asyncio.get_running_loop())
        thread_calls.post(lambda: 1 / 0)
        thread_calls.post(after.set)
        await asyncio.wait_for(after.wait(), DEADLINE_S)

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text


# ---- where code runs


def test_async_code_runs_on_a_loop_of_its_own_made_when_first_needed() -> None:
    async def scenario(executor: UserExecutor) -> None:
        async def where() -> tuple[str, asyncio.AbstractEventLoop]:
            return threading.current_thread().name, asyncio.get_running_loop()

        assert [t.name for t in threading.enumerate() if t.name.startswith("daskserve-")] == []
        name, loop = await executor.run_async(where)
        assert name == "daskserve-b#AAAAAA"
        assert loop is not asyncio.get_running_loop()
        assert await executor.run_async(where) == (name, loop)

    run(scenario)


def test_libraries_find_one_task_that_lasts_as_long_as_the_users_loop() -> None:
    """AnyIO keeps its idle threads until that task ends."""

    async def scenario(executor: UserExecutor) -> None:
        async def thread() -> threading.Thread:
            return await anyio.to_thread.run_sync(threading.current_thread)

        assert len({await executor.run_async(thread) for _ in range(20)}) == 1

    run(scenario)


def test_a_result_does_not_wait_for_code_that_blocks_the_loop_right_after_it() -> None:
    async def scenario(executor: UserExecutor) -> None:
        may_end = threading.Event()

        async def quick() -> str:
            return "done"

        async def blocks_the_loop() -> None:
            may_end.wait(DEADLINE_S)

        async def wait() -> None:
            pass

        await executor.run_async(wait)  # the loop exists
        calls = [start_async(executor, quick), start_async(executor, blocks_the_loop)]
        assert await calls[0].wait() == "done"
        assert not calls[1].is_ended
        may_end.set()
        await calls[1].wait()

    run(scenario)


def test_user_code_that_cancels_all_tasks_does_not_end_its_loop() -> None:
    async def scenario(executor: UserExecutor) -> None:
        async def cancel_all() -> int:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.sleep(0)
            return len(others)

        for _ in range(2):
            assert await executor.run_async(cancel_all) == 1

    run(scenario)


def test_on_the_workers_loop_nothing_is_crossed() -> None:
    async def scenario(executor: UserExecutor) -> None:
        async def where() -> asyncio.AbstractEventLoop:
            return asyncio.get_running_loop()

        assert await executor.run_async(where) is asyncio.get_running_loop()
        assert await executor.run_sync(threading.current_thread) is not threading.current_thread()

    run(scenario, event_loop="worker")


def test_plain_functions_run_side_by_side_in_as_many_threads_as_allowed() -> None:
    async def scenario(executor: UserExecutor) -> None:
        together = threading.Barrier(3)
        calls = [start_sync(executor, together.wait, DEADLINE_S) for _ in range(3)]
        assert sorted([await call.wait() for call in calls]) == [0, 1, 2]
        for _ in range(20):
            thread = await executor.run_sync(threading.current_thread)
            assert thread.daemon
        assert len(executor.threads) == 3

    run(scenario, threads=3)


def test_threads_start_only_when_they_are_needed() -> None:
    async def scenario(executor: UserExecutor) -> None:
        assert len(executor.threads) == 0
        for _ in range(5):
            await executor.run_sync(int)
        assert len(executor.threads) == 1

    run(scenario, threads=8)


def test_the_loop_runs_in_the_thread_that_has_loaded_its_code() -> None:
    async def scenario(executor: UserExecutor) -> None:
        loader = await executor.run_sync(threading.current_thread)

        async def where() -> threading.Thread:
            return threading.current_thread()

        assert await executor.run_async(where) is loader
        assert len(executor.threads) == 0
        beside = await executor.run_sync(threading.current_thread)
        assert beside is not loader
        assert len(executor.threads) == 1
        assert await executor.close(DEADLINE_S)
        assert not loader.is_alive()
        assert not beside.is_alive()

    run(scenario, threads=2)


def test_the_loop_does_not_wait_for_a_thread_that_is_busy() -> None:
    async def scenario(executor: UserExecutor) -> None:
        may_end = threading.Event()
        busy = start_sync(executor, may_end.wait, DEADLINE_S)

        async def release() -> None:
            may_end.set()

        await executor.run_async(release)
        assert await busy.wait() is True

    run(scenario, threads=2)


# ---- results, errors, context


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("mine")])
def test_an_exception_that_would_end_the_loop_ends_only_the_call(
    event_loop: str, error: BaseException
) -> None:
    async def scenario(executor: UserExecutor) -> None:
        async def end_async() -> None:
            raise error

        def end() -> None:
            raise error

        for ending in (executor.run_async(end_async), executor.run_sync(end)):
            with pytest.raises(PackedError, match=type(error).__name__) as caught:
                await ending
            assert isinstance(caught.value.known, UserCodeError)
        assert await executor.run_sync(str, "alive") == "alive"

    run(scenario, event_loop=event_loop)


def test_a_function_may_raise_stop_iteration() -> None:
    async def scenario(executor: UserExecutor) -> None:
        with pytest.raises(PackedError, match="StopIteration"):
            await executor.run_sync(next, iter(()))

    run(scenario)


def test_each_call_gets_a_fresh_copy_of_the_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def scenario(executor: UserExecutor) -> None:
        executor.context.run(variable.set, "replica")

        def read_then_write() -> str:
            found = variable.get()
            variable.set("changed")
            return found

        async def read_then_write_async() -> str:
            return read_then_write()

        for _ in range(2):
            assert await executor.run_sync(read_then_write) == "replica"
            assert await executor.run_async(read_then_write_async) == "replica"
        request = executor.context.copy()
        request.run(variable.set, "request")
        assert await start_sync(executor, read_then_write, context=request).wait() == "request"
        assert variable.get() == "unset"

    run(scenario)


# ---- cancellation


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_cancelling_the_caller_cancels_async_code_and_reports_its_end(event_loop: str) -> None:
    async def scenario(executor: UserExecutor) -> None:
        began, cancelled, release = threading.Event(), threading.Event(), threading.Event()
        ended: list[bool] = []

        async def stubborn() -> None:
            began.set()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.set()
                await until(release.is_set)
                raise

        call = start_async(executor, stubborn, on_end=lambda: ended.append(True))
        caller = asyncio.create_task(call.wait())
        await asyncio.sleep(0)  # the code waits now
        await until(began.is_set)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await until(cancelled.is_set)
        assert ended == []
        release.set()
        await until(lambda: ended == [True])

    run(scenario, event_loop=event_loop)


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_call_cancelled_before_its_first_step_ends_exactly_once(event_loop: str, turns: int) -> None:
    async def scenario(executor: UserExecutor) -> None:
        ended: list[bool] = []

        async def forever() -> None:
            await asyncio.get_running_loop().create_future()

        for _ in range(20):
            ended.clear()
            call = start_async(executor, forever, on_end=lambda: ended.append(True))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            call.cancel()
            await until(lambda: bool(ended))
            assert call.is_ended
        assert ended == [True]
        assert not executor.runs

    run(scenario, event_loop=event_loop)


def test_plain_work_that_has_not_begun_is_dropped() -> None:
    async def scenario(executor: UserExecutor) -> None:
        release = threading.Event()
        ran: list[str] = []
        ended: list[bool] = []
        busy = start_sync(executor, release.wait, DEADLINE_S)
        dropped = start_sync(executor, ran.append, "dropped", on_end=lambda: ended.append(True))
        dropped.cancel()
        assert ended == [True]
        assert executor.abandoned == 0
        release.set()
        await busy.wait()
        await executor.run_sync(int)
        assert ran == []
        assert ended == [True]

    run(scenario, threads=1)


def test_aborting_gives_every_caller_the_error_begun_or_not() -> None:
    async def scenario(executor: UserExecutor) -> None:
        began, release = threading.Event(), threading.Event()

        def stuck() -> None:
            began.set()
            release.wait(DEADLINE_S)

        async def forever() -> None:
            await asyncio.get_running_loop().create_future()

        calls = [start_sync(executor, stuck), start_sync(executor, stuck), start_async(executor, forever)]
        callers = [asyncio.create_task(call.wait()) for call in calls]
        await until(began.is_set)
        executor.abort_runs(LookupError("stopped"))
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert [repr(result) for result in results] == ["LookupError('stopped')"] * 3
        release.set()

    run(scenario, threads=1)


# ---- user code that misbehaves


def test_a_background_task_that_exits_or_stops_the_loop_does_not_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(executor: UserExecutor) -> None:
        async def spawn() -> None:
            async def leave() -> None:
                sys.exit(1)

            task = asyncio.create_task(leave())
            task.add_done_callback(lambda done: done.exception())

        async def stop() -> None:
            asyncio.get_running_loop().stop()

        async def alive() -> bool:
            return True

        await executor.run_async(spawn)
        await executor.run_async(stop)
        for _ in range(3):
            assert await executor.run_async(alive)

    run(scenario)
    assert "SystemExit in a background task" in caplog.text


def test_code_that_blocks_its_own_loop_is_reported_once_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(executor: UserExecutor) -> None:
        release = threading.Event()

        async def blocks_the_loop() -> None:
            release.wait(DEADLINE_S)

        call = start_async(executor, blocks_the_loop)
        await until(lambda: executor.blocked_count == 1)
        await asyncio.sleep(0.12)  # long enough for a second report, if there were one
        release.set()
        await call.wait()
        assert executor.blocked_count == 1

    with caplog.at_level(logging.WARNING, "daskserve.replica"):
        run(scenario)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "daskserve-b#AAAAAA" in messages[0]
    assert "test_user_executor.py:" in messages[0]
    assert "blocks_the_loop" in messages[0]


def test_code_that_blocks_the_workers_loop_is_reported_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    async def blocks_the_loop() -> None:
        time.sleep(3 * BLOCKED_AFTER_S)  # the fault under test

    async def scenario(executor: UserExecutor) -> None:
        await executor.run_async(blocks_the_loop)
        await until(lambda: executor.blocked_count > 0)

    with caplog.at_level(logging.WARNING, "daskserve.replica"):
        run(scenario, event_loop="worker")
    assert "User code blocked the worker's event loop for" in caplog.text
    assert "test_user_executor.py:" in caplog.text
    assert "b#AAAAAA" in caplog.text


class WatchedLoop:
    """A fake loop of a worker or of user code for a watch, in steps of a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.posts: list[Callable[[], None]] = []
        self.is_blocked = False
        # A loop of user code.
        self.loop = self.thread_calls = self
        # The thread has no system id, because its waiting time for a processor would be that of this test.
        self.thread = types.SimpleNamespace(ident=threading.get_ident(), native_id=None, name="user")

    def time(self) -> float:
        return self.now

    def post(self, function: Callable[[], None]) -> None:
        self.posts.append(function)

    def drain(self) -> None:
        pass

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        when = self.now + delay_s
        self.timers.append((when, callback))
        return types.SimpleNamespace(when=lambda: when)

    def step(self) -> None:
        self.now += 0.001
        if self.is_blocked:
            return
        posts, self.posts = self.posts, []
        for post in posts:
            post()
        due = [each for each in self.timers if each[0] <= self.now]
        self.timers = [each for each in self.timers if each not in due]
        for _, callback in due:
            callback()


def stack(*modules: str) -> Any:
    """Return the innermost frame of a stack of modules, given outermost first."""
    frame = None
    for module in modules:
        code = types.SimpleNamespace(co_filename=f"{module}.py", co_name="run")
        frame = types.SimpleNamespace(f_back=frame, f_globals={"__name__": module}, f_code=code, f_lineno=1)
    return frame


IN_USER_CODE = stack("threading", "asyncio.events", "daskserve.data.replica.user_code.servable", "app")
IN_A_LIBRARY = stack("threading", "daskserve.data.replica.execution.user_threads", "queue")


class WatchedLoops:
    """The loops of a worker and of a replica, their watches, and the frames on the loops' stacks."""

    def __init__(self, frame: Any, *, is_silent: bool = False) -> None:
        self.worker, self.user, self.both = WatchedLoop(), WatchedLoop(), WatchedLoop()
        self.frame = frame

        def frames() -> dict[int | None, Any]:
            return {threading.get_ident(): self.frame}

        runs, worker, user, both = ["a run"], *cast(Any, (self.worker, self.user, self.both))
        self.own = LoopWatch(worker, runs, worker, user, is_silent=is_silent, frames=frames)
        self.shared: Any = SharedLoopWatch(both, runs, "b#AAAAAA", frames)
        self.shared._loop_thread = self.user.thread
        self.shared._periodic = types.SimpleNamespace(resume=lambda: None, pause=lambda: None)
        self.own.arm()
        self.shared.arm()

    def run(self, blocked: range, *, looks_every_ms: int = round(1000 * WATCH_INTERVAL_S)) -> None:
        for now_ms in range(blocked.stop + 200):
            self.user.is_blocked = self.both.is_blocked = now_ms in blocked
            self.worker.is_blocked = bool(now_ms % looks_every_ms)
            for loop in (self.worker, self.user, self.both):
                loop.step()
            if not now_ms % looks_every_ms:
                self.shared.check()

    @property
    def counts(self) -> tuple[int, int]:
        return self.own.blocked_count, self.shared.blocked_count


@pytest.mark.parametrize(("blocked_ms", "count"), [(90, 0), (135, 1), (2_000, 1)])
def test_a_loop_that_is_blocked_even_briefly_is_counted_once_whenever_that_begins(
    blocked_ms: int, count: int
) -> None:
    for phase_ms in range(0, 60, 3):
        loops = WatchedLoops(IN_USER_CODE)
        loops.run(range(100 + phase_ms, 100 + phase_ms + blocked_ms), looks_every_ms=1)
        assert loops.counts == (count, count), phase_ms


def test_a_loop_that_is_late_without_user_code_on_its_stack_is_not_blamed() -> None:
    loops = WatchedLoops(IN_A_LIBRARY)
    loops.run(range(100, 5000))
    assert loops.counts == (0, 0)


def test_a_loop_that_plain_functions_may_block_is_not_counted() -> None:
    loops = WatchedLoops(IN_USER_CODE, is_silent=True)
    loops.run(range(100, 5000), looks_every_ms=1)
    assert loops.counts == (0, 1)


def test_a_busy_machine_is_not_blamed_on_user_code() -> None:
    """For 300 ms at a time, nothing runs: neither the loop nor its watch."""
    loops = WatchedLoops(IN_USER_CODE)
    loops.run(range(100, 5000), looks_every_ms=300)
    assert loops.counts == (0, 0)


def test_code_that_blocks_the_workers_loop_and_never_waits_is_counted() -> None:
    async def blocking() -> str:
        threading.Event().wait(2 * BLOCKED_AFTER_S)
        return "done"

    async def scenario(executor: UserExecutor) -> None:
        result = RunResult()
        assert executor.enter(blocking, (), contextvars.copy_context(), result) is None
        assert await result.wait(None) == "done"
        await until(lambda: executor.blocked_count == 1)

    run(scenario, event_loop="worker")


def test_a_probe_of_plain_code_does_not_wait_for_the_threads_of_requests() -> None:
    async def scenario(executor: UserExecutor) -> None:
        may_end, plain = (
            threading.Event(),
            cast("Any", SimpleNamespace(is_plain_at_all=True, is_async_at_all=False)),
        )
        request = asyncio.create_task(executor.run_sync(may_end.wait, 2 * DEADLINE_S))
        await until(lambda: executor.threads.unfinished == 1)
        try:
            await probe_liveness(executor, plain, "b#AAAAAA", 1)
        finally:
            may_end.set()
            await request

    run(scenario)


# ---- the end


def test_closing_cancels_everything_and_leaves_no_thread() -> None:
    async def scenario(executor: UserExecutor) -> None:
        begun, cancelled = threading.Event(), threading.Event()

        async def forever() -> None:
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        await executor.run_sync(int)
        await executor.run_sync(int, threads=executor.reserved)
        caller = asyncio.create_task(executor.run_async(forever))
        await until(begun.is_set)
        assert await executor.close(DEADLINE_S)
        assert cancelled.is_set()
        with pytest.raises(ClosedError):
            await caller
        assert [t.name for t in threading.enumerate() if t.name.startswith("daskserve-")] == []
        with pytest.raises(ClosedError):
            await executor.run_sync(int)
        assert await executor.close(DEADLINE_S)

    run(scenario)


def test_closing_cancels_background_tasks_and_waits_until_they_have_ended() -> None:
    ended = threading.Event()

    async def background() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0.01)  # as for the last message on a connection
            ended.set()

    async def scenario(executor: UserExecutor) -> None:
        tasks = []

        async def spawn() -> None:
            tasks.append(asyncio.create_task(background()))
            await asyncio.sleep(0)  # the task begins

        await executor.run_async(spawn)
        assert await executor.close(DEADLINE_S)
        assert ended.is_set()
        assert tasks[0].cancelled()

    run(scenario)


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_closing_leaves_stuck_code_behind_after_the_grace_period(kind: str) -> None:
    async def scenario(executor: UserExecutor) -> None:
        began, release = threading.Event(), threading.Event()

        def stuck() -> None:
            began.set()
            release.wait(DEADLINE_S)

        async def stuck_async() -> None:
            stuck()

        call = start_sync(executor, stuck) if kind == "thread" else start_async(executor, stuck_async)
        await until(began.is_set)
        assert not await executor.close(0.02)
        left = [t for t in threading.enumerate() if t.name.startswith("daskserve-")]
        assert [t.daemon for t in left] == [True]
        release.set()
        await until(lambda: call.is_ended)

    run(scenario)
