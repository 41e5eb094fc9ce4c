"""The runner for async code: the user's event loop, in its own thread.

The loop runs one task that lasts as long as the loop, as it would under ``asyncio.run``. Libraries attach
resources to this task that outlive a request. AnyIO keeps its idle threads until the task ends; without it,
AnyIO would start a thread for each request of a FastAPI or Starlette application with plain endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any

from daskserve.common.clock import LoopClock
from daskserve.common.types import OpenSocket
from daskserve.data.replica.execution.runner import CodeRun, RunListener, Runs
from daskserve.data.replica.execution.user_threads import UserThreads, wait_for_event
from daskserve.loops.event_loop import new_event_loop
from daskserve.loops.forks import end_fork
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.loops.threads import RunningThread, StartThread

logger = logging.getLogger("daskserve.replica")


class LoopRunner:
    """Runs coroutine functions in tasks on the worker's event loop."""

    #: Whether this is the worker's loop, on which errors of user code must not be packed.
    is_workers = True

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs) -> None:
        self.loop = loop
        self.runs = runs
        #: The id of this process; user code may fork other processes.
        self.pid = os.getpid()

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: RunListener
    ) -> LoopRun:
        """Run a coroutine function in a task; see `daskserve.data.replica.execution.runner`."""
        return LoopRun(self, function, args, context, on_end)

    def to_user(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop of user code."""
        function(*args)

    def to_worker(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the worker's loop."""
        function(*args)


class LoopRun(CodeRun):
    """A coroutine function in a separate task."""

    __slots__ = ("_runner", "_task")

    def __init__(
        self,
        runner: LoopRunner,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context,
        listener: RunListener,
    ) -> None:
        # The same as `CodeRun.__init__`, without one more call per request.
        self._runs = runs = runner.runs
        self._function = function
        self._args = args
        self._context = context
        self._listener = listener
        self.is_cancelled = self.is_ended = False
        self._runner = runner
        self._task: asyncio.Task[None] | None = None
        runs.add(self)
        runner.to_user(self._begin)

    def _stop(self) -> None:
        self._runner.to_user(self._cancel)

    # ---- on the user-code loop

    def _begin(self) -> None:
        if self.is_cancelled:
            self._runner.to_worker(self._end, None, None)
        else:
            self._task = self._runner.loop.create_task(self._run(), context=self._context)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            # A task that is cancelled before its first step never reports its own end.
            self._task.add_done_callback(self._report_cancelled)

    def _report_cancelled(self, task: asyncio.Task[None]) -> None:
        self._runner.to_worker(self._end, None, None)

    async def _run(self) -> None:
        try:
            value = await self._function(*self._args)
        except BaseException as error:  # even SystemExit, because the loop runs other requests
            if os.getpid() != self._runner.pid:
                end_fork()
            if self._runner.is_workers and not self.is_cancelled:
                self._pack(error)
            else:
                self._fail(error, self._runner.to_worker)
            if issubclass(type(error), asyncio.CancelledError):
                self._task = None  # otherwise the task, its error and this frame reference each other
                raise
        else:
            if os.getpid() != self._runner.pid:
                end_fork()
            self._runner.to_worker(self._end, value, None)


class UserLoop(LoopRunner):
    """Runs coroutine functions in tasks on an event loop that has its own daemon thread."""

    is_workers = False

    def __init__(self, name: str, context: Context, to_worker: ThreadCalls, runs: Runs) -> None:
        super().__init__(new_event_loop(), runs)
        self.thread_calls = ThreadCalls(self.loop)
        #: The thread of the loop, once it runs.
        self.thread: RunningThread
        self._name = name
        self._context = context
        self._worker = to_worker
        self._is_closing = False
        self._closing: asyncio.Future[None] | None = None
        self._grace_s = 0.0
        self._ended = asyncio.Event()
        self._guests: set[OpenSocket] = set()
        self._no_guests = asyncio.Event()

    def run_in_thread(
        self,
        threads: UserThreads,
        start_thread: StartThread,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Run the loop in the idle thread of ``threads``, or in a new one.

        The idle thread has just loaded user code, and a class without plain methods does not need it again.
        The thread first calls ``before``, which must not raise.
        """
        main = partial(self._context.run, self._main, before)
        idle = threads.give_away(main)
        if idle is None:
            self.thread = start_thread(self._name, main)
        else:
            self.thread = idle
            idle.name = self._name

    def to_user(self, function: Callable[..., object], *args: Any) -> None:
        self._post(self.thread_calls, function, args)

    def to_worker(self, function: Callable[..., object], *args: Any) -> None:
        self._post(self._worker, function, args)

    def _post(
        self, thread_calls: ThreadCalls, function: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        # A single request does not wait for others to share its wake-ups.
        post = thread_calls.post_soon if len(self.runs) > 1 else thread_calls.post
        post(function, *args)

    def admit(self, guest: OpenSocket) -> None:
        """Register a connection to close before the loop ends. Call this on this loop."""
        self._guests.add(guest)

    def dismiss(self, guest: OpenSocket) -> None:
        """Remove a connection that has ended."""
        self._guests.discard(guest)
        if not self._guests:
            self._no_guests.set()

    async def close(self, grace_s: float) -> bool:
        """Cancel running code, end the loop and its thread; return False if user code does not end."""
        if not self._is_closing:
            self._grace_s = grace_s / 2
            self._is_closing = True
            self.thread_calls.post(self._wake_root)
        if not await wait_for_event(self._ended, grace_s):
            return False
        self.thread.join()  # the loop has ended, so this takes microseconds
        return True

    def _main(self, before: Callable[[], None] | None) -> None:
        if before is not None:
            self._context.copy().run(before)
            del before  # the thread, and with it this frame, lasts as long as the loop
        asyncio.set_event_loop(self.loop)
        root = self.loop.create_task(self._run_until_closing(), name="daskserve-user-loop")
        # If user code stops the loop by mistake, or by sys.exit() in a task, the loop continues.
        while not root.done():
            try:
                self.loop.run_until_complete(root)
            except RuntimeError:
                pass  # the loop was stopped
            except (SystemExit, KeyboardInterrupt) as error:
                logger.error("User code raised %s in a background task", type(error).__name__)
        ends_at = self.loop.time() + self._grace_s
        self._cancel_tasks()
        if self._guests:
            self.loop.run_until_complete(self._end_guests(ends_at))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        self.loop.close()
        self._worker.post(self._ended.set)

    async def _run_until_closing(self) -> None:
        while not self._is_closing:
            self._closing = asyncio.get_running_loop().create_future()
            try:
                await self._closing
            except asyncio.CancelledError:
                pass  # user code may cancel all tasks of its loop; only `close` ends this one

    def _wake_root(self) -> None:
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=self._grace_s))

    async def _end_guests(self, ends_at: float) -> None:
        """Wait for connections that are closing, for the rest of the grace period."""
        clock = LoopClock()
        self._no_guests.clear()
        with suppress(TimeoutError):
            await clock.wait_for(self._no_guests.wait(), ends_at - clock.now())
        for guest in list(self._guests):
            guest.abort()
        for _ in range(2):  # until their transports are closed
            await clock.sleep(0)
