"""Runs a user's router in its own thread.

Problem: the event loop that asks a router sends all requests of a process. If a router were called on the
loop and hung, the process could send no requests at all, because Python cannot interrupt code in a thread.
Choice: the router runs in a thread, and the loop waits only a short time for the answer. A late router is not
called again until it has answered and a pause has passed, which becomes longer each time.

The thread sleeps while it reads a pipe. The write that wakes the thread releases the interpreter lock, which
the thread takes, so it has usually answered before the loop continues. With a queue, both threads would sleep
and wake twice, once for the queue and once for the lock, and an answer would cost twice the CPU time (13 µs
instead of 6). For the same reason the thread runs on the same processor as the loop.

Events are passed to the router in order, without waiting.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from daskserve.common.clock import stopwatch
from daskserve.common.formatting import shown
from daskserve.loops.processors import Follower

#: How long the event loop waits for an answer.
ANSWER_S = 0.1
#: How long a late router is not called; doubles each time.
PENALTY_S = 1.0
MAX_PENALTY_S = 60.0
#: Maximum number of events that wait for the router; later ones are dropped.
MAX_BEHIND = 10_000


class RouterError(Exception):
    """A router has raised an error, is late, or gave no valid answer. ``kind`` is the label for metrics."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


class RouterThread:
    """The thread of one router. `ask` and `tell` are called on one event loop."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._wakes, self._wake = os.pipe()
        #: Whether the thread will look for jobs without another write.
        self._is_awake = False
        self._is_closed = False
        self._penalty_s = PENALTY_S
        self._not_before = 0.0
        self._late: _Ask | None = None
        self._posted = self._finished = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._needs_loop = False
        # A new context, not that of the first request.
        run = contextvars.Context().run
        started = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)
        started.start()
        assert started.native_id is not None
        self._follower = Follower(started.native_id)

    def _run(self) -> None:
        jobs = self._jobs
        while not self._is_closed:
            os.read(self._wakes, 64)
            self._is_awake = False  # set first, so that a job that is added from now on writes again
            while jobs:
                jobs.popleft()()
        os.close(self._wakes)
        if self._loop is not None:
            self._loop.close()

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if not (self._is_awake or self._is_closed):
            self._is_awake = True
            os.write(self._wake, b".")

    def close(self) -> None:
        """End the thread after the jobs that are already queued."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._wake)  # the end of the pipe wakes the thread

    @property
    def is_usable(self) -> bool:
        """Whether the router may be called: it is not late, and no pause is running."""
        if self._late is None:
            return True
        if self._late.is_done and stopwatch() >= self._not_before:
            self._late = None
            return True
        return False

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the thread, and return its result.

        Raises
        ------
        RouterError
            It raised an error, or has not answered in time.
        """
        job = _Ask(function, args)
        self._follower.follow()
        self._put(job)
        # In the usual case the answer is already there, and an attempt without a time limit costs a fifth.
        if not job.answered.acquire(False) and not job.answered.acquire(True, ANSWER_S):
            self._late = job
            self._follower.release()  # the router may compute for a long time
            if stopwatch() - self._not_before >= MAX_PENALTY_S:
                self._penalty_s = PENALTY_S  # the router has answered in time for long enough
            self._not_before = stopwatch() + self._penalty_s
            self._penalty_s = min(2 * self._penalty_s, MAX_PENALTY_S)
            raise RouterError("late", f"has not answered within {shown(ANSWER_S)} s")
        if job.error is not None:
            raise job.error
        return job.value

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the thread without waiting; the function must handle its own errors."""
        if self._posted - self._finished < MAX_BEHIND:
            self._posted += 1
            self._put(partial(self._run_posted, function, *args))

    def _run_posted(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        finally:
            self._finished += 1

    def finished(self, coroutine: Coroutine[Any, Any, Any], again: Callable[[], Any]) -> Any:
        """Return the result of a coroutine; runs in the thread.

        Most coroutines do not wait, and run without an event loop, which would take ten times as long. If a
        coroutine does wait, it is called ``again`` on a loop, and so are all later ones.
        """
        if not self._needs_loop:
            try:
                coroutine.send(None)
            except StopIteration as end:
                return end.value
            except RuntimeError as error:
                if "event loop" not in str(error):
                    raise
            coroutine.close()
            self._needs_loop = True
            coroutine = again()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)


class _Ask:
    """A function whose result the event loop waits for."""

    __slots__ = ("_args", "_function", "answered", "error", "is_done", "value")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.answered = _thread.allocate_lock()
        self.answered.acquire()

    def __call__(self) -> None:
        try:
            self.value = self._function(*self._args)
        except BaseException as error:  # SystemExit would end the thread
            self.error = error
        self.is_done = True
        self.answered.release()
