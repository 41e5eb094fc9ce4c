"""The thread wall: user code on one side, the worker's event loop on the other.

Problem: user code blocks, and the worker's loop carries everybody's heartbeats, probes and requests. So
``async def`` code of a replica runs on an event loop in a thread of its own, plain functions run in a pool
of threads, and only small, quick functions cross over. Choices:

- Crossing costs a system call and a change of threads, so a `daskserve.loops.hops.Hop` takes along all that
  was posted until the other side gets to it: under load many requests share one crossing.
- Nothing can stop a thread. A call that was given up and runs on is `Wall.abandoned` until it returns.
- A blocked loop is noticed from outside (`LoopWatch`), while it is blocked, so that the place can be told.
- On the worker's loop a task for each piece of user code costs as much as all that the router does for a
  request. It is there for code that does not heed its cancellation: whoever asked can go on without it. Where
  nobody would, because the request has no deadline to be told of, the code runs within the request's own
  task (`InPlaceCall`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

from daskserve.context import current_request
from daskserve.data.replica.loop_watch import LoopWatch, SharedLoopWatch
from daskserve.data.replica.user_threads import UserLoop, UserThreads
from daskserve.errors import ClosedError, UserCodeError
from daskserve.loops.hops import Hop, Landing
from daskserve.loops.tasks import is_cancelling

T = TypeVar("T")
Post = Callable[..., None]
OnEnd = Callable[[], None] | None
AsyncFunction = Callable[..., Awaitable[T]]


class Call(Generic[T]):
    """One piece of user code under way, as the worker's loop sees it.

    ``on_end`` is called there exactly once, when the code has really ended (or will never begin), which
    after a cancellation may be long after `wait` has raised.
    """

    def __init__(
        self, wall: Wall, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: OnEnd
    ) -> None:
        self._wall = wall
        self._function = function
        self._args = args
        self._context = context
        self._on_end = on_end

    # Most calls never have any of these, and one is made per request.
    _waiter: asyncio.Future[None] | None = None
    #: Called in the place of whoever would wait, when the call has ended or `notify` was called.
    watcher: Callable[[], None] | None = None
    _value: Any = None
    _error: BaseException | None = None
    _abort_error: BaseException | None = None
    is_cancelled = False
    is_ended = False
    #: Whether it only runs while it is awaited.
    is_in_place = False

    def wait(self) -> Awaitable[T]:
        """Return what the code returned or raise what it raised; cancelling this cancels the code."""
        return self._wait()

    async def _wait(self) -> T:
        while not self.is_ended:
            await self.changed()
        return self.result()

    async def changed(self) -> None:
        """Return when the call has ended or `notify` was called; raise if it was aborted."""
        if self._abort_error is None:
            self._waiter = self._wall.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None
        if self._abort_error is not None:
            raise self._abort_error

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        if self.watcher is not None:
            self.watcher()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def result(self) -> T:
        """Return or raise what the ended call came to."""
        error, self._error = self._abort_error or self._error, None
        if error is None:
            return self._value  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # else the traceback holds this frame, and this frame the error

    def abort(self, error: BaseException) -> None:
        """Cancel the code and make whoever waits for it raise ``error``."""
        if not self.is_ended:
            self._abort_error = error
            self.cancel()
            self.notify()

    def cancel(self) -> None:
        """Ask the code to end, and with it the calls it waits for; does nothing once it has ended."""
        if not self.is_ended and not self.is_cancelled:
            self.is_cancelled = True
            self._stop()
            # After the code itself: async code that awaits one of them is to be cancelled once, not twice.
            request = self._context.get(current_request)
            if request is not None:
                request.cancel_calls()

    def _stop(self) -> None:
        raise NotImplementedError

    def _end(self, value: Any, error: BaseException | None) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        if error is None:
            self._value = value
        else:
            self._error = error
        self._args = ()
        self._wall.calls.discard(self)
        if self._on_end is not None:
            self._on_end()
        watcher, self.watcher = self.watcher, None  # it has nothing more to see
        if watcher is not None:
            watcher()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LoopCall(Call[T]):
    """A coroutine function on the user's loop, or in mode ``worker`` on the worker's."""

    def begin(self, loop: asyncio.AbstractEventLoop, to_user: Post, to_worker: Post) -> None:
        self._user_loop = loop
        self._to_user = to_user
        self._to_worker = to_worker
        self._task: asyncio.Task[None] | None = None
        to_user(self._begin)

    def _stop(self) -> None:
        self._to_user(self._cancel)

    # ---- on the user's loop

    def _begin(self) -> None:
        if self.is_cancelled:
            self._to_worker(self._end, None, None)
        else:
            self._task = self._user_loop.create_task(self._run(), context=self._context)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            # A task that is cancelled before its first step never gets to report its own end.
            self._task.add_done_callback(lambda _: self._to_worker(self._end, None, None))

    async def _run(self) -> None:
        try:
            value = await self._function(*self._args)
        except BaseException as error:
            self._to_worker(self._end, None, reportable(error))
            # A sys.exit() in a handler ends that request, not the loop that all the others run on.
            if not isinstance(error, (Exception, SystemExit, KeyboardInterrupt)):
                raise
        else:
            self._to_worker(self._end, value, None)


class InPlaceCall(Call[T]):
    """A coroutine function on the worker's loop, run by and within the task that awaits `wait`.

    A client that leaves cancels that task, and `abort` what the code waits for. Code that goes on in spite of
    that keeps its slot, as it would anywhere else, and whoever awaits it waits on.
    """

    is_in_place = True
    #: The coroutine and what it waits for, if it has been entered before it is awaited.
    _code: Coroutine[Any, Any, T] | None = None
    _waits_for: asyncio.Future[Any] | None = None
    _must_throw = False

    def wait(self) -> InPlaceCall[T]:
        return self

    def __await__(self) -> Generator[Any, Any, T]:
        run = self._context.run
        code, waits_for = self._code, self._waits_for
        try:
            if code is None:
                code = self._function(*self._args)
                waits_for = run(code.send, None)
            while True:
                self._waits_for = waits_for
                try:
                    answer = yield waits_for
                    if self._must_throw:
                        self._must_throw = False
                        raise asyncio.CancelledError
                except BaseException as thrown:  # it is for the code
                    try:
                        waits_for = run(code.throw, thrown)
                    finally:
                        self._cancel_calls(thrown)
                else:
                    waits_for = run(code.send, answer)
        except StopIteration as end:
            value = end.value
            self._end(value, None)
            if self._abort_error is None:
                return value  # type: ignore[no-any-return]
        except asyncio.CancelledError as error:
            self._end(None, reportable(error))
            if self._abort_error is None and is_cancelling():
                raise
        except GeneratorExit:
            self._end(None, None)
            raise
        except BaseException as error:
            self._end(None, reportable(error))
        return self.result()

    def _cancel_calls(self, thrown: BaseException) -> None:
        # After the code itself: if it awaits one of them, it is to be cancelled once, not twice. And what the
        # code did to itself, by a timeout of its own for example, it has taken back by now.
        if isinstance(thrown, asyncio.CancelledError) and (self.is_cancelled or is_cancelling()):
            request = self._context.get(current_request)
            if request is not None:
                request.cancel_calls()

    def _stop(self) -> None:
        # As `Task.cancel` does it, but the task is not ours.
        if self._waits_for is None or not self._waits_for.cancel():
            self._must_throw = True


class ThreadCall(Call[T]):
    """A plain function in one of the user's threads."""

    def begin(self, threads: UserThreads) -> None:
        self._threads = threads
        # Whoever gets it decides: the thread that the function runs, the canceller that it never will.
        self._claim = threading.Lock()
        self._is_abandoned = False
        threads.put(self._run)

    def _stop(self) -> None:
        if self._claim.acquire(blocking=False):
            self._end(None, None)
        else:
            self._is_abandoned = True
            self._wall.abandoned += 1

    def _end(self, value: Any, error: BaseException | None) -> None:
        self._threads.unfinished -= 1
        self._wall.abandoned -= self._is_abandoned
        super()._end(value, error)

    # ---- in a user's thread

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        post = self._wall.to_worker.post
        try:
            value = self._context.run(self._function, *self._args)
        except BaseException as error:  # the caller's, all of them: this thread serves others after it
            post(self._end, None, reportable(error))
        else:
            post(self._end, value, None)


def reportable(error: BaseException) -> Exception:
    """Return the error, or a stand-in for one that would end the caller's task or loop if raised there."""
    if isinstance(error, Exception):
        return error
    stand_in = UserCodeError(f"The user's code raised {type(error).__name__}: {error}")
    stand_in.__cause__ = error
    return stand_in


class Wall:
    """Runs user code away from the worker's loop, where the wall itself lives.

    Parameters
    ----------
    name : str
        Of the threads: ``daskserve-<name>``.
    context : Context
        Every call runs in a fresh copy of it.
    threads : int
        How many plain functions may run at a time.
    event_loop : str
        ``"own"``: async code has a loop in its own thread. ``"worker"``: it runs on the worker's loop, with
        nothing in between; plain functions keep to their threads.
    landing : Landing, optional
        Where what comes back is to arrive on the worker's loop.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        *,
        threads: int = 1,
        event_loop: str = "own",
        landing: Landing | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.to_worker = Hop(self.loop, landing)
        self.context = context
        self.is_on_worker_loop = event_loop == "worker"
        #: Calls that were given up but run on.
        self.abandoned = 0
        #: How many times user code was seen blocking its own loop.
        self.blocked_count = 0
        #: Off while user code starts: a constructor may take its time, nobody waits behind it.
        self.is_watched = True
        self.calls: set[Call[Any]] = set()
        self.threads = UserThreads(f"daskserve-{name}", threads, self.to_worker)
        self._reserved = UserThreads(f"daskserve-{name}-probe", 1, self.to_worker)
        #: Serves neither requests nor probes: what hangs there holds up nobody.
        self.aside = UserThreads(f"daskserve-{name}-aside", 1, self.to_worker)
        self._name = name
        self._user_loop: UserLoop | None = None
        self._watch: LoopWatch | SharedLoopWatch | None = None
        if self.is_on_worker_loop:
            self._watch = SharedLoopWatch(self, name)
        self.is_closed = False

    @property
    def user_loop(self) -> UserLoop:
        """The user's own loop, made on first use."""
        if self._user_loop is None:
            self._user_loop = UserLoop(f"daskserve-{self._name}", self.context.copy(), self.to_worker)
            self._watch = LoopWatch(self, self._user_loop)
            self._user_loop.thread.start()
        return self._user_loop

    def start_async(
        self, function: AsyncFunction[T], *args: Any, context: Context | None = None, on_end: OnEnd = None
    ) -> Call[T]:
        """Start a coroutine function where async user code runs; see `Call`."""
        call: LoopCall[T] = LoopCall(self, function, args, context or self.context.copy(), on_end)
        self._admit(call)
        if self.is_on_worker_loop:
            call.begin(self.loop, _run_here, _run_here)
        else:
            user_loop = self._user_loop or self.user_loop
            call.begin(user_loop.loop, user_loop.hop.post_soon, self._post_from_user)
        if self._watch is None or self._watch.timer is None:
            self._arm_watch()
        return call

    def start_in_place(
        self, function: AsyncFunction[T], *args: Any, context: Context, on_end: OnEnd = None
    ) -> InPlaceCall[T]:
        """Prepare a coroutine function to run where it is awaited, which is on the worker's loop."""
        if not self.calls:  # else it is armed
            self._arm_watch()
        call: InPlaceCall[T] = InPlaceCall(self, function, args, context, on_end)
        self._admit(call)
        return call

    def start_sync(
        self,
        function: Callable[..., T],
        *args: Any,
        context: Context | None = None,
        on_end: OnEnd = None,
        reserved: bool = False,
        threads: UserThreads | None = None,
    ) -> Call[T]:
        """Start a plain function in a thread, with ``reserved`` in one that serves no requests."""
        call: ThreadCall[T] = ThreadCall(self, function, args, context or self.context.copy(), on_end)
        self._admit(call)
        call.begin(threads or (self._reserved if reserved else self.threads))
        return call

    def enter(self, function: AsyncFunction[T], *args: Any, context: Context) -> T | InPlaceCall[T]:
        """Run a coroutine function on the worker's loop, here and now, up to where it first waits.

        Return what it has come to or, if it waits, the call to be awaited at once. Code that never waits is
        thus spared all that waiting takes: to be known, to be watched, to be cancelled.
        """
        if self.is_closed:
            raise ClosedError("The replica has been stopped.")
        if self._watch is None or self._watch.timer is None:
            self._arm_watch()
        code: Any = function(*args)
        try:
            waits_for = context.run(code.send, None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except asyncio.CancelledError as error:
            if is_cancelling():
                raise
            raise reportable(error) from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise reportable(error) from error
        call: InPlaceCall[T] = InPlaceCall(self, function, (), context, None)
        call._code, call._waits_for = code, waits_for
        self.calls.add(call)
        return call

    async def run_async(self, function: AsyncFunction[T], *args: Any) -> T:
        """Return or raise what a coroutine function comes to on the user's side."""
        return await self.start_async(function, *args).wait()

    async def run_sync(self, function: Callable[..., T], *args: Any, reserved: bool = False) -> T:
        """Return or raise what a plain function comes to in a user's thread."""
        return await self.start_sync(function, *args, reserved=reserved).wait()

    def abort_calls(self, error: BaseException) -> None:
        """Cancel all user code that runs; whoever waits for it gets ``error``."""
        for call in list(self.calls):
            call.abort(error)

    async def close(self, grace_s: float) -> bool:
        """End the loop and all threads, and return whether they ended within ``grace_s``.

        What is stuck is left behind on its daemon thread, where it holds up nobody. Idempotent.
        """
        self.is_closed = True
        self.abort_calls(ClosedError("The replica has been stopped."))
        closing = [each.close(grace_s) for each in (self.threads, self._reserved, self.aside)]
        if self._user_loop is not None:
            closing.append(self._user_loop.close(grace_s))
        return all(await asyncio.gather(*closing))

    def _post_from_user(self, function: Callable[..., object], *args: Any) -> None:
        # What ends last on the user's loop has nothing behind it that could block that loop.
        if len(self.calls) > 1:
            self.to_worker.post(function, *args)
        else:
            self.to_worker.post_soon(function, *args)

    def _arm_watch(self) -> None:
        if self._watch is not None and self.is_watched:
            self._watch.arm()

    def _admit(self, call: Call[Any]) -> None:
        if self.is_closed:
            raise ClosedError("The replica has been stopped.")
        self.calls.add(call)


def _run_here(function: Callable[..., object], *args: Any) -> None:
    function(*args)
