"""Threads for user code: new ones, or the main thread of a process that does not use it otherwise."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")

#: Maximum interval at which an idle main thread handles signals.
SIGNAL_CHECK_S = 1.0


class RunningThread(Protocol):
    """A thread that runs one function."""

    name: str

    @property
    def ident(self) -> int | None:
        """The thread's ``ident`` in Python."""

    @property
    def native_id(self) -> int | None:
        """The thread's id in the operating system."""

    def join(self) -> None:
        """Return when the function has returned."""


#: Runs a function in a thread with a name, and returns the thread; raises `RuntimeError` if there is none.
StartThread: TypeAlias = Callable[[str, Callable[[], object]], RunningThread]


def start_daemon(name: str, function: Callable[[], object]) -> RunningThread:
    """Run a function in a new thread, which does not keep the process alive."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread


async def in_daemon(name: str, function: Callable[[threading.Event], ResultT]) -> ResultT:
    """Return the result of a function that runs in a new thread.

    The function gets an event, which is set when this coroutine ends, even if it is cancelled.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ResultT] = loop.create_future()
    stop = threading.Event()

    def end(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not result.done():
            set_outcome(outcome)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = result.set_result, function(stop)
        except Exception as error:
            outcome = result.set_exception, error
        except BaseException as error:  # even SystemExit, which would end only this thread
            outcome = result.set_exception, RuntimeError(repr(error))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, *outcome)

    start_daemon(name, run)
    try:
        return await result
    finally:
        stop.set()


JobT = TypeVar("JobT")


def waiter_for_jobs(jobs: queue.SimpleQueue[JobT]) -> Callable[[], JobT]:
    """Return a function that waits for a queue's next item; in the main thread, signals are still handled."""
    is_main = threading.current_thread() is threading.main_thread()
    return partial(_next_job, jobs) if is_main else jobs.get


def _next_job(jobs: queue.SimpleQueue[JobT]) -> JobT:
    while True:
        try:
            # A signal that arrives just before the thread begins to wait does not wake it.
            return jobs.get(timeout=SIGNAL_CHECK_S)
        except queue.Empty:
            pass


class _MainThreadJob:
    """A job of the main thread. The thread keeps its name, because libraries rely on it."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name = name
        self.ident = threading.main_thread().ident
        self.native_id = threading.main_thread().native_id
        self._function = function
        self._ended = threading.Event()

    def join(self) -> None:
        self._ended.wait()

    def run(self) -> None:
        try:
            self._function()
        finally:
            self._ended.set()


class MainThread:
    """Runs functions in the main thread, where user code may set signal handlers."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_MainThreadJob | None] = queue.SimpleQueue()
        self._is_free = threading.Lock()
        #: Is set when `run` returns or raises.
        self.has_ended = threading.Event()

    def start(self, name: str, function: Callable[[], object]) -> RunningThread:
        """Run a function in the main thread, or in a new one if that is not free; a `StartThread`."""
        if not self._is_free.acquire(blocking=False):
            return start_daemon(name, function)
        job = _MainThreadJob(name, function)
        self._jobs.put(job)
        return job

    def run(self) -> None:
        """Run the functions passed to `start`, until `end` is called; call this in the main thread.

        Raises
        ------
        SystemExit, KeyboardInterrupt
            A signal handler of user code has raised it outside of requests.
        """
        try:
            while (job := _next_job(self._jobs)) is not None:
                job.run()
                del job  # an idle thread must not keep user code in memory
                self._is_free.release()
        finally:
            self.has_ended.set()

    def end(self) -> None:
        """Let `run` return as soon as the main thread is free."""
        self._jobs.put(None)
