"""Runs the steps of a continuous batch, and hands each caller its outputs.

The callers of one engine share an event loop. Async code runs in a task on that loop, which exists while
there is something to do. Plain code runs in a thread of the engine, step after step without waiting for the
loop; the thread sleeps while there is nothing to do, and then refers to neither the engine nor the instance.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from daskserve.common.clock import LoopClock, stopwatch
from daskserve.context import current_request
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.continuous.rounds import Outcome, Rounds
from daskserve.data.batching.stream import MAX_BUFFERED_RESULTS
from daskserve.errors import ServeError, UnavailableError
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.loops.threads import start_daemon
from daskserve.telemetry.tracing.batches import SpansOfBatch

logger = logging.getLogger("daskserve.replica")

#: A caller that has caught up so far takes part in steps again.
_RESUMES_AT = MAX_BUFFERED_RESULTS // 2

Functions = Mapping[str, Callable[..., Any]]


async def stream(begin: Callable[[], tuple[Engine, ActiveRequest]]) -> AsyncIterator[Any]:
    """Yield the outputs of the request that ``begin`` makes, which takes part until this ends."""
    engine, request = begin()
    loop = asyncio.get_running_loop()
    outputs = request.outputs
    engine.add(request)
    try:
        while True:
            has_ended = request.has_ended  # before the outputs: it may end meanwhile, with another one
            if request.read < len(outputs):
                output = outputs[request.read]
                request.read += 1
                if request.is_paused and len(outputs) - request.read <= _RESUMES_AT:
                    engine.go_on(request)
                yield output
                del output
            elif has_ended:
                if request.error is not None:
                    raise request.error
                return
            else:
                request.waiter = waiter = loop.create_future()
                # Checked after the future is known: a thread that adds an output from now on sees it.
                if request.read == len(outputs) and not request.has_ended:
                    await waiter
    finally:
        request.waiter = None
        engine.leave(request)


class Engine:
    """A continuous batch on one event loop.

    Parameters
    ----------
    functions : mapping
        The functions of user code by name: ``step``, and where it has them ``prefill`` and ``release``.
    instance : weak reference, optional
        The object that they are methods of.
    """

    def __init__(self, rounds: Rounds, functions: Functions, instance: weakref.ref[Any] | None) -> None:
        self.rounds = rounds
        self._functions = functions
        self._instance = instance
        self._is_async = inspect.iscoroutinefunction(functions["step"])
        self._loop_calls = ThreadCalls(asyncio.get_running_loop())
        self._context = contextvars.copy_context()
        # The batch belongs to no single request: the deadline and id of one would be wrong for the others.
        self._context.run(self._leave_request)
        self._task: asyncio.Task[None] | None = None
        #: Whether user code runs that may be cancelled once nobody waits for it.
        self._is_cancellable = False
        self._wake_thread: threading.Event | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is active."""
        slots = self.rounds.slots
        return not slots.queued and not slots.active

    def load(self) -> tuple[int, int, float]:
        """Return the active and queued requests, and the cost of the queued ones; for any thread."""
        slots = self.rounds.slots
        return len(slots.active), slots.queued, slots.queued_cost

    def queued(self) -> int:
        """Return how many requests wait; any thread may call this."""
        return self.rounds.slots.queued

    def add(self, request: ActiveRequest) -> None:
        """Let a request take part; raises as `Slots.add`."""
        evicted = self.rounds.add(request)
        if evicted is not None:
            _wake(evicted)
        try:
            self._wake()
        except BaseException:
            self.rounds.leave(request)
            raise

    def go_on(self, request: ActiveRequest) -> None:
        """Note that the caller of a paused request has caught up."""
        self.rounds.go_on(request)
        self._wake()

    def leave(self, request: ActiveRequest) -> None:
        """Note that the caller of a request has left, or has its last output."""
        if not request.has_ended and self.rounds.leave(request):
            self._wake()
            self._cancel_step()

    # ---- running user code

    def _leave_request(self) -> None:
        current_request.set(None)
        SpansOfBatch("", ()).__enter__()

    def _wake(self) -> None:
        """Have the steps go on, if they have stopped."""
        if not self._is_async:
            if self._wake_thread is None:
                self._wake_thread = _start_thread(self)
            self._wake_thread.set()
        elif self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), context=self._context)

    def _own(self) -> tuple[Any, ...]:
        if self._instance is None:
            return ()
        instance = self._instance()
        if instance is None:
            raise ReferenceError("the object of the method is gone")
        return (instance,)

    async def _run(self) -> None:
        try:
            own = self._own()
            while (call := self.rounds.next_call()) is not None:
                began = stopwatch()
                self._is_cancellable = call[0] != "release"
                outcome = await self._answer(*call, own)
                self._is_cancellable = False
                self.rounds.note(call, outcome, stopwatch() - began)
                _wake_all(self.rounds.take_woken())
                # Let callers run, even if user code never waits.
                await LoopClock().sleep(0)
        except asyncio.CancelledError:
            self.rounds.fail_all(UnavailableError("The event loop of the batch ends; call again later."))
            raise
        except Exception as error:
            self._fail_all(error)
        finally:
            self._task = None
            _wake_all(self.rounds.take_woken())

    async def _answer(self, name: str, requests: list[ActiveRequest], own: tuple[Any, ...]) -> Outcome:
        function = self._functions.get(name)
        if function is None:
            return None, None
        try:
            value = function(*own, requests)
            if inspect.isawaitable(value):
                value = await value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            assert task is not None
            if self._is_cancellable:
                if task.cancelling():
                    raise
            elif task.uncancel():  # one cancellation is that of `_cancel_step`
                raise
            return None, error
        except BaseException as error:  # SystemExit of user code, too: it must not end the loop
            return None, self._logged(name, error)
        return value, None

    def _cancel_step(self) -> None:
        """Cancel the step that runs, if there is one and nobody waits for it."""
        if self._task is not None and self._is_cancellable and self.rounds.is_unwanted:
            self._is_cancellable = False
            self._task.cancel()

    def run_in_thread(self) -> None:
        """Run steps until there is nothing to do; in the engine's thread."""
        self._context.run(self._run_plain)

    def _run_plain(self) -> None:
        try:
            own = self._own()
            while (call := self.rounds.next_call()) is not None:
                began = stopwatch()
                outcome = self._answer_plain(*call, own)
                self.rounds.note(call, outcome, stopwatch() - began)
                self._post_woken()
        except Exception as error:
            self._fail_all(error)
        self._post_woken()

    def _answer_plain(self, name: str, requests: list[ActiveRequest], own: tuple[Any, ...]) -> Outcome:
        function = self._functions.get(name)
        if function is None:
            return None, None
        try:
            return function(*own, requests), None
        except BaseException as error:  # as above
            return None, self._logged(name, error)

    def _post_woken(self) -> None:
        if woken := self.rounds.take_woken():
            self._loop_calls.post(_wake_all, woken)

    def _logged(self, name: str, error: BaseException) -> BaseException:
        if name == "release":  # there is no caller that would get it
            logger.error("The release of %s raised an error", self.rounds.name, exc_info=error)
        return error

    def _fail_all(self, error: Exception) -> None:
        logger.error("Internal error in the batch of %s", self.rounds.name, exc_info=error)
        self.rounds.fail_all(ServeError(f"Internal error in the batch of {self.rounds.name}: {error!r}"))


def _wake(request: ActiveRequest) -> None:
    waiter, request.waiter = request.waiter, None
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _wake_all(requests: list[ActiveRequest]) -> None:
    for request in requests:
        _wake(request)


def _start_thread(engine: Engine) -> threading.Event:
    """Start the thread of an engine; return the event that makes it work, or end once the engine is gone."""
    wake = threading.Event()
    ref = weakref.ref(engine, lambda _: wake.set())

    def work() -> None:
        while True:
            wake.wait()
            wake.clear()
            present = ref()
            if present is None:
                return
            present.run_in_thread()
            del present

    start_daemon("daskserve-steps", work)
    return wake
