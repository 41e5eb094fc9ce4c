"""Runs user code apart from the worker's event loop.

Problem: user code blocks, and the worker's loop carries heartbeats, health probes and all requests. So
``async def`` code of a replica runs on a separate event loop and thread, plain functions run in a pool of
threads, and only short callbacks cross between the threads. Choices:

- A crossing costs a system call and a thread switch. So `daskserve.loops.thread_calls.ThreadCalls` delivers
  all posted callbacks at once: under load, many requests share one crossing.
- A thread cannot be stopped. A cancelled run counts as `UserExecutor.abandoned` until it returns.
- Another thread (`LoopWatch`) detects that user code blocks its loop, and logs the position in the code.

The executor chooses the runner for each piece of user code; see `daskserve.data.replica.execution.runner`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, NoReturn, TypeVar

from daskserve.data.replica.execution.error_packing import ErrorPackers
from daskserve.data.replica.execution.loop_thread import LoopThread
from daskserve.data.replica.execution.loop_watch import LoopWatch, SharedLoopWatch
from daskserve.data.replica.execution.runner import CodeRun, RunListener, RunResult, Runs
from daskserve.data.replica.execution.task_run import TaskRun
from daskserve.data.replica.execution.user_loop import LoopRunner, UserLoop
from daskserve.data.replica.execution.user_threads import UserThreads
from daskserve.errors import ClosedError
from daskserve.loops.tasks import is_cancelling
from daskserve.loops.thread_calls import CallInbox, ThreadCalls
from daskserve.loops.threads import StartThread, start_daemon
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.profiling.sampling import LOOP, THREADS, CodeThread

T = TypeVar("T")


class UserExecutor:
    """Runs user code apart from the worker's loop; the executor itself runs on the worker's loop.

    Parameters
    ----------
    name : str
        The threads are named ``daskserve-<name>``.
    context : Context
        Hooks run in a fresh copy of it.
    threads : int
        How many plain functions may run at a time.
    event_loop : str
        With ``"own"``, async code runs on a loop in its own thread; with ``"worker"``, on the worker's loop.
        Plain functions run in threads with both.
    is_loop_shared : bool
        Whether plain functions run in the thread of the user's own loop, and block it.
    inbox : CallInbox, optional
        Receives callbacks on the worker's loop; see `daskserve.loops.thread_calls`.
    start_thread : callable
        Starts the threads of user code. The first one loads the code, and then runs its loop or functions.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        *,
        threads: int = 1,
        event_loop: str,
        is_loop_shared: bool = False,
        inbox: CallInbox | None = None,
        start_thread: StartThread = start_daemon,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._loop_thread = threading.current_thread()
        self.to_worker = ThreadCalls(self.loop, inbox)
        self.context = context
        self.is_on_worker_loop = event_loop == "worker"
        #: False while user code starts, because no request waits for a slow constructor.
        self.is_watched = True
        #: Packs errors of user code. The runs are those that have started and not ended.
        self.packers = ErrorPackers(f"daskserve-{name}-errors", self.to_worker)
        self.runs = Runs(self.packers.pack)
        self.is_loop_shared = is_loop_shared
        self.threads: UserThreads
        #: Runs probes only, so that they need not wait for requests.
        self.reserved: UserThreads
        #: Runs neither requests nor probes, so a function that hangs here blocks no other code.
        self.background: UserThreads
        if is_loop_shared:
            self.threads = LoopThread(self._post_to_user, self.to_worker, self.runs)
            self.reserved = self.background = self.threads
        else:
            self.threads = UserThreads(f"daskserve-{name}", threads, self.to_worker, self.runs, start_thread)
            self.reserved = UserThreads(f"daskserve-{name}-probe", 1, self.to_worker, self.runs)
            self.background = UserThreads(f"daskserve-{name}-background", 1, self.to_worker, self.runs)
        self._name = name
        self._start_thread = start_thread
        self._user_loop: UserLoop | None = None
        self._worker_loop = LoopRunner(self.loop, self.runs)
        self._watch: LoopWatch | SharedLoopWatch | None = None
        if self.is_on_worker_loop:
            self._watch = SharedLoopWatch(self.loop, self.runs, name)
        self.is_closed = False

    @property
    def blocked_count(self) -> int:
        """How many times user code has blocked its event loop."""
        return 0 if self._watch is None else self._watch.blocked_count

    @property
    def abandoned(self) -> int:
        """How many cancelled runs have not ended."""
        return sum(each.abandoned for each in self._runners)

    @property
    def _runners(self) -> set[UserThreads]:
        return {self.threads, self.reserved, self.background}

    @property
    def user_loop(self) -> UserLoop:
        """The user's own loop, created on first use."""
        return self._user_loop or self.open_loop()

    @property
    def code_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the user's async code; None if there is none yet."""
        if self.is_on_worker_loop:
            return self.loop
        return None if self._user_loop is None else self._user_loop.loop

    def code_threads(self) -> dict[int, CodeThread]:
        """Return the threads that run user code, by ident; any thread may call this."""
        found = [(THREADS, thread) for each in self._runners for thread in each.threads()]
        if self.is_on_worker_loop:
            found.append((LOOP, self._loop_thread))
        # the thread may just be starting
        elif (thread := getattr(self._user_loop, "thread", None)) is not None:
            found.append((LOOP, thread))
        return {each.ident or 0: CodeThread(label, each.native_id) for label, each in found}

    def open_loop(self, before: Callable[[], None] | None = None) -> UserLoop:
        """Create the user's own loop; its thread first calls ``before``, which must not raise."""
        loop = UserLoop(f"daskserve-{self._name}", self.context.copy(), self.to_worker, self.runs)
        self._user_loop = loop
        self._watch = LoopWatch(self.loop, self.runs, self.to_worker, loop, is_silent=self.is_loop_shared)
        loop.run_in_thread(self.threads, self._start_thread, before)
        return loop

    def _post_to_user(self, function: Callable[..., object], *args: Any) -> None:
        self.user_loop.thread_calls.post(function, *args)

    def start(
        self,
        is_async: bool,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context,
        on_end: RunListener,
    ) -> CodeRun | None:
        """Start user code in its runner; see `daskserve.data.replica.execution.runner`."""
        if self.is_closed:
            raise ClosedError("The replica has been stopped.")
        if not is_async:
            return self.threads.start(function, args, context, on_end)
        runner = self._worker_loop if self.is_on_worker_loop else self._user_loop or self.user_loop
        watch = self._watch
        if watch is not None and watch.timer is None and self.is_watched:
            watch.arm()
        return runner.start(function, args, context, on_end)

    def enter(
        self, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: RunListener
    ) -> CodeRun | None:
        """Run async code on the worker's loop within the current task, until it first waits.

        Unlike with `start`, the task has to await `CodeRun.drive` at once. If this returns None, the code has
        never waited and has ended.
        """
        if self.is_closed:
            raise ClosedError("The replica has been stopped.")
        watch = self._watch
        if watch is not None and watch.timer is None and self.is_watched:
            watch.arm()
        code = function(*args)
        try:
            waits_for = context.run(code.send, None)
        except StopIteration as end:
            on_end.run_ended(end.value, None)
            return None
        except BaseException as error:  # all errors go to the caller
            # Not `isinstance`, which may run code of the error's class.
            if issubclass(type(error), asyncio.CancelledError) and is_cancelling():
                raise
            code = _raise_packed(self.packers.pack(error, context))
            waits_for = code.send(None)
        run = TaskRun(self.runs, code, waits_for, context, on_end)
        self.runs.add(run)
        return run

    async def run_async(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a coroutine function on the loop of user code; return its result or raise its error."""
        result = RunResult()
        run = self.start(True, function, args, self.context.copy(), result)
        return await result.wait(run)  # type: ignore[no-any-return]

    async def run_sync(self, function: Callable[..., T], *args: Any, threads: UserThreads | None = None) -> T:
        """Run a plain function in a thread, by default one for requests; return its result."""
        if self.is_closed:
            raise ClosedError("The replica has been stopped.")
        result = RunResult()
        runner = self.threads if threads is None else threads
        run = runner.start(function, args, self.context.copy(), result)
        return await result.wait(run)  # type: ignore[no-any-return]

    def abort_runs(self, error: Exception) -> None:
        """Cancel all running user code; its callers get ``error``."""
        for run in list(self.runs):
            run.abort(error)

    async def close(self, grace_s: float) -> bool:
        """End the loop and all threads, and return whether they ended within ``grace_s``. Idempotent.

        Stuck code stays in its daemon thread, where it blocks nothing else.
        """
        self.is_closed = True
        self.abort_runs(ClosedError("The replica has been stopped."))
        if self._watch is not None:
            self._watch.close()
        closing = [self.packers.close(grace_s), *(each.close(grace_s) for each in self._runners)]
        if self._user_loop is not None:
            closing.append(self._user_loop.close(grace_s))
        return all(await asyncio.gather(*closing))


async def _raise_packed(packing: asyncio.Future[PackedError]) -> NoReturn:
    raise await packing
