"""The runner for plain functions: a pool of daemon threads.

It does not use ``concurrent.futures``, because the interpreter joins the threads of that module when it
exits: one stuck function would keep the process alive for ever.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any

from daskserve.data.replica.execution.runner import CodeRun, RunListener, Runs
from daskserve.loops.forks import end_fork
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.loops.threads import RunningThread, StartThread, start_daemon, waiter_for_jobs


class ThreadRun(CodeRun):
    """A plain function in a user-code thread."""

    __slots__ = ("_claim", "_is_abandoned", "_threads")

    def __init__(
        self,
        threads: UserThreads,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context,
        listener: RunListener,
    ) -> None:
        # The same as `CodeRun.__init__`, without one more call per request.
        self._runs = threads.runs
        self._function = function
        self._args = args
        self._context = context
        self._listener = listener
        self.is_cancelled = self.is_ended = False
        self._threads = threads
        # Acquired once: by the thread that runs the function, or by a cancellation that prevents it.
        self._claim = threading.Lock()
        self._is_abandoned = False

    def _stop(self) -> None:
        if self._claim.acquire(blocking=False):
            self._end(None, None)
        else:
            self._is_abandoned = True
            self._threads.abandoned += 1

    def _end(self, value: Any, error: Exception | None) -> None:
        self._threads.unfinished -= 1
        self._threads.abandoned -= self._is_abandoned
        super()._end(value, error)

    def withdraw(self) -> bool:
        """Withdraw the run without notifying its listener; return False if it has begun."""
        if not self._claim.acquire(blocking=False):
            return False
        self._threads.unfinished -= 1
        self._runs.discard(self)
        return True

    def run(self) -> None:
        """Run the function, unless it was cancelled before; runs in a user-code thread."""
        if not self._claim.acquire(blocking=False):
            return
        post = self._threads.to_worker.post
        try:
            value = self._context.run(self._function, *self._args)
        except BaseException as error:  # all errors go to the caller: this thread runs other requests next
            if os.getpid() != self._threads.pid:
                end_fork()
            self._fail(error, post)
        else:
            if os.getpid() != self._threads.pid:
                end_fork()
            post(self._end, value, None)


class UserThreads:
    """Runs plain functions in up to ``limit`` daemon threads, which start on demand.

    Parameters
    ----------
    runs : Runs
        Holds each run until it has ended.
    start_thread : callable
        Starts each thread.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        to_worker: ThreadCalls,
        runs: Runs,
        start_thread: StartThread = start_daemon,
    ) -> None:
        self.limit = limit
        self.to_worker = to_worker
        self.runs = runs
        #: Cancelled runs that have not ended.
        self.abandoned = 0
        self.unfinished = 0
        self.pid = os.getpid()
        self._name = name
        self._start_thread = start_thread
        #: The jobs of the threads. A thread that takes a plain function instead of a run ends after it.
        self._jobs: queue.SimpleQueue[ThreadRun | Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[RunningThread] = []
        self._running_threads = 0
        self._all_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._threads)

    def threads(self) -> Sequence[RunningThread]:
        """Return the threads that have been started."""
        return tuple(self._threads)

    def make_room(self, running: int) -> None:
        """Raise the limit to at least ``running + 1``."""
        self.limit = max(self.limit, running + 1)

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: RunListener
    ) -> ThreadRun:
        """Run a function as soon as a thread is free; see `daskserve.data.replica.execution.runner`."""
        run = ThreadRun(self, function, args, context, on_end)
        self.runs.add(run)
        self._jobs.put(run)
        self.unfinished += 1
        if self.unfinished > len(self._threads) < self.limit:
            try:
                thread = self._start_thread(f"{self._name}-{len(self)}", self._work)
            except RuntimeError:
                if run.withdraw():
                    raise
                return run  # another thread already runs it
            self._threads.append(thread)
            self._running_threads += 1
        return run

    async def close(self, grace_s: float) -> bool:
        """End the threads; return whether all have ended in time. A stuck thread ends with its function."""
        for _ in self._threads:
            self._jobs.put(None)
        if self._running_threads and not await wait_for_event(self._all_ended, grace_s):
            return False
        for thread in self._threads:
            thread.join()  # its function has returned, so this takes microseconds
        self._threads.clear()
        return True

    def give_away(self, function: Callable[[], object]) -> RunningThread | None:
        """Run a function in the only thread if it is idle; remove the thread from the pool and return it.

        The pool starts a new thread when it needs one.
        """
        if self.unfinished or len(self._threads) != 1:
            return None
        thread = self._threads.pop()
        self._running_threads -= 1
        self._jobs.put(function)
        return thread

    def _work(self) -> None:
        wait = waiter_for_jobs(self._jobs)
        while (job := wait()) is not None:
            if not isinstance(job, ThreadRun):
                job()
                return
            job.run()
            del job  # an idle thread must not keep a request in memory
        self.to_worker.post(self._note_thread_end)

    def _note_thread_end(self) -> None:
        self._running_threads -= 1
        if not self._running_threads:
            self._all_ended.set()


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; return whether it was set before the timeout."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()
