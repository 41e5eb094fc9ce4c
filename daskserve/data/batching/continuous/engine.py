"""Runs the steps of a continuous batch, and hands each caller its outputs.

The callers of one engine share an event loop. Async code runs in a task on that loop while there are
requests. Plain code runs in a thread of the engine, step after step without waiting for the loop. While there
are no requests, the thread sleeps, and refers to neither the engine nor the instance.
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
from daskserve.context import current_replica, current_request
from daskserve.data.batching.continuous.request import ActiveRequest
from daskserve.data.batching.continuous.rounds import Outcome, Rounds
from daskserve.data.batching.results import as_results
from daskserve.data.batching.stream import MAX_BUFFERED_RESULTS
from daskserve.errors import ServeError, UnavailableError
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.loops.threads import start_daemon
from daskserve.telemetry.tracing.batches import SpansOfBatch, SpansOfSteps, span_of_item

logger = logging.getLogger("daskserve.replica")

#: A paused request takes part in steps again once its caller has at most this many outputs left to read.
_RESUMES_AT = MAX_BUFFERED_RESULTS // 2

Functions = Mapping[str, Callable[..., Any]]


async def stream(begin: Callable[[], tuple[Engine, ActiveRequest]]) -> AsyncIterator[Any]:
    """Yield the outputs of the request that ``begin`` returns; the request leaves when the iterator ends."""
    engine, request = begin()
    loop = asyncio.get_running_loop()
    outputs = request.outputs
    # Set before the request is added, because a thread may answer it at once.
    request.span = span = span_of_item(engine.rounds.name)
    try:
        engine.add(request)
    except BaseException as error:
        if span is not None:
            span.__exit__(type(error), error, None)
        raise
    try:
        while True:
            if request.read < len(outputs):
                output = outputs[request.read]
                request.read += 1
                if span is not None and request.read == 1:
                    span.add_event("first output")
                if request.is_paused and len(outputs) - request.read <= _RESUMES_AT:
                    engine.resume(request)
                yield output
                del output
            elif request.has_ended or request.has_left:  # it has left after `step_timeout_s`
                if request.read < len(outputs):
                    continue  # a thread has added an output before the end
                if request.error is not None:
                    raise request.take_error()
                return
            else:
                request.waiter = waiter = loop.create_future()
                if engine.is_async or engine.is_still_waiting(request):
                    await waiter
    finally:
        request.waiter = None
        engine.leave(request)
        if span is not None:
            span.set_attribute("daskserve.outputs", len(outputs))
            span.end()


class Engine:
    """A continuous batch on one event loop.

    Parameters
    ----------
    functions : mapping
        The functions of user code by name: ``step``, and optionally ``prefill`` and ``release``.
    instance : weak reference, optional
        The object that they are methods of.
    step_timeout_s : float, optional
        If a call of user code takes longer, its requests fail.
    """

    def __init__(
        self,
        rounds: Rounds,
        functions: Functions,
        instance: weakref.ref[Any] | None,
        step_timeout_s: float | None = None,
    ) -> None:
        self.rounds = rounds
        self._step_timeout_s = step_timeout_s
        #: The start time of the running call of user code, on the clock of the loop; None if none runs.
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._spans = SpansOfSteps(rounds.name)
        self._functions = functions
        self._instance = instance
        self.is_async = inspect.iscoroutinefunction(functions["step"])
        self._loop_calls = ThreadCalls(asyncio.get_running_loop())
        replica = current_replica.get()
        # A weak reference, because the replica's context refers to the instance, which a batch must not keep
        # alive.
        self._replica = None if replica is None else weakref.ref(replica)
        #: The context of the thread's next run; None while there is nothing to do.
        self._context: contextvars.Context | None = None
        self._task: asyncio.Task[None] | None = None
        #: Whether the user code that runs now may be cancelled when its last caller leaves.
        self._is_cancellable = False
        #: Whether this engine has cancelled the running user code, which has not ended yet.
        self._is_cancelled = False
        self._wake_thread: threading.Event | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is active."""
        slots = self.rounds.slots
        return not slots.queued and not slots.active

    def load(self) -> tuple[int, int, float, int]:
        """Return the active and queued requests, the cost of the queued ones, and the slots; any thread may
        call this."""
        slots = self.rounds.slots
        return len(slots.active), slots.queued, slots.queued_cost, slots.limits.max_slots

    def queued(self) -> int:
        """Return the number of waiting requests; any thread may call this."""
        return self.rounds.slots.queued

    def running_s(self) -> float:
        """Return for how long the call of user code has run; 0 if there is none. Any thread may call this."""
        began = self._began
        return 0.0 if began is None else max(0.0, self._loop_calls.loop.time() - began)

    def add(self, request: ActiveRequest) -> None:
        """Add a request; raise the errors of `Slots.add`, or `UnavailableError` while a step is late."""
        running_s = self.running_s()
        if self._step_timeout_s is not None and running_s >= self._step_timeout_s:
            raise UnavailableError(self._late_text(running_s))
        evicted = self.rounds.add(request)
        if evicted is not None:
            _wake_all([evicted])
        try:
            self._wake()
        except BaseException:
            self.rounds.leave(request)
            raise

    def resume(self, request: ActiveRequest) -> None:
        """Record that the caller of a paused request has caught up."""
        self.rounds.resume(request)
        self._wake()

    def leave(self, request: ActiveRequest) -> None:
        """Record that the caller of a request has left, or has its last output."""
        if not request.has_ended and self.rounds.leave(request):
            self._wake()
            self._cancel_step()

    def is_still_waiting(self, request: ActiveRequest) -> bool:
        """Return whether the caller of a request, whose waiter is set now, still has nothing to read.

        A thread may have added an output before the waiter was set; it wakes the waiter only for later
        outputs.
        """
        if request.read < len(request.outputs) or request.has_ended or request.has_left:
            return False
        # The thread may have paused the request because of outputs that have since been read.
        if self.rounds.is_paused(request):
            self.resume(request)
        return True

    # ---- running user code

    def _new_context(self) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(self._leave_request)
        return context

    def _leave_request(self) -> None:
        # The batch serves several requests, so the deadline and id of one of them would be wrong for the
        # others.
        current_request.set(None)
        current_replica.set(None if self._replica is None else self._replica())
        SpansOfBatch("", ()).__enter__()

    def _wake(self) -> None:
        """Start the steps again if they have stopped."""
        if self._timer is None and self._step_timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._step_timeout_s, self._watch)
        if not self.is_async:
            if self._wake_thread is None:
                self._wake_thread = _start_thread(self)
            if self._context is None:
                self._context = self._new_context()
            self._wake_thread.set()
        elif self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), context=self._new_context())

    def _watch(self) -> None:
        """Fail the requests of a call that runs too long; check again later while there are requests."""
        self._timer, timeout_s, running_s = None, self._step_timeout_s, self.running_s()
        assert timeout_s is not None
        if running_s >= timeout_s and (given_up := self.rounds.give_up(self._late_text(running_s))):
            logger.error("%s %d requests have failed.", self._late_text(running_s), len(given_up))
            _wake_all(given_up)
            self._cancel_step()
        if not self.is_idle:
            delay_s = timeout_s - running_s if running_s < timeout_s else timeout_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._watch)

    def _late_text(self, running_s: float) -> str:
        return f"A step of {self.rounds.name} has run for {running_s:.1f} s, longer than step_timeout_s."

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
                began, self._began = stopwatch(), self._loop_calls.loop.time()
                self._is_cancellable = call[0] != "release"
                outcome = await self._answer(*call, own)
                self._is_cancellable, self._began = False, None
                self.rounds.note(call, outcome, stopwatch() - began)
                _wake_all(self.rounds.take_woken())
                # Let callers run, even if user code never waits.
                await LoopClock().sleep(0)
        except asyncio.CancelledError:
            self.rounds.fail_all(UnavailableError("The event loop of the batch is ending; call again later."))
            raise
        except Exception as error:
            self._fail_all(error)
        finally:
            self._spans.end()
            self._task = None
            _wake_all(self.rounds.take_woken())

    def _call(self, name: str, requests: list[ActiveRequest], own: tuple[Any, ...]) -> Any:
        """Call user code; return its result, or an awaitable of it."""
        function = self._functions.get(name)
        if function is None:  # there is nothing to release
            return None
        if name != "release":
            self._spans.begin(name, requests)
        return function(*own, list(requests))  # a copy, because user code may change the list

    async def _answer(self, name: str, requests: list[ActiveRequest], own: tuple[Any, ...]) -> Outcome:
        try:
            value = self._call(name, requests, own)
            if inspect.isawaitable(value):
                value = await value
            return _listed(self.rounds, name, value, len(requests)), None
        except asyncio.CancelledError as error:
            if self._task is not None and self._task.cancelling() > self._is_cancelled:
                raise  # cancelled by code other than this engine, such as a loop that ends
            return None, error
        except BaseException as error:  # even SystemExit in user code, which must not end the loop
            return None, self._logged(name, error)
        finally:
            if self._is_cancelled and self._task is not None:
                self._is_cancelled = False
                self._task.uncancel()

    def _cancel_step(self) -> None:
        """Cancel the running step if all of its callers have left."""
        if self._task is not None and self._is_cancellable and self.rounds.is_unwanted:
            self._is_cancellable = False
            self._is_cancelled = True
            self._task.cancel()

    def run_in_thread(self) -> None:
        """Run steps until there is nothing to do; in the engine's thread."""
        context, self._context = self._context, None
        if context is not None:  # otherwise the previous run has handled the requests of this wake-up
            context.run(self._run_plain)

    def _run_plain(self) -> None:
        try:
            own = self._own()
            while (call := self.rounds.next_call()) is not None:
                began, self._began = stopwatch(), self._loop_calls.loop.time()
                outcome = self._answer_plain(*call, own)
                self._began = None
                self.rounds.note(call, outcome, stopwatch() - began)
                self._post_woken()
        except Exception as error:
            self._fail_all(error)
        self._spans.end()
        self._post_woken()

    def _answer_plain(self, name: str, requests: list[ActiveRequest], own: tuple[Any, ...]) -> Outcome:
        try:
            return _listed(self.rounds, name, self._call(name, requests, own), len(requests)), None
        except BaseException as error:  # even SystemExit, as in `_answer`
            return None, self._logged(name, error)

    def _post_woken(self) -> None:
        if woken := self.rounds.take_woken():
            self._loop_calls.post(_wake_all, woken)

    def _logged(self, name: str, error: BaseException) -> BaseException:
        if name == "release":  # no caller gets this error
            logger.error("The release of %s raised an error", self.rounds.name, exc_info=error)
        else:
            self._spans.end(error)
        return error

    def _fail_all(self, error: Exception) -> None:
        logger.error("Internal error in the batch of %s", self.rounds.name, exc_info=error)
        self.rounds.fail_all(ServeError(f"Internal error in the batch of {self.rounds.name}: {error!r}"))


def _listed(rounds: Rounds, name: str, value: Any, count: int) -> list[Any] | None:
    """Return the results of user code as a list. Call this without the lock: an iterator may compute."""
    if name == "release" or (name == "prefill" and value is None):
        return None
    return as_results(rounds.name if name == "step" else f"The {name} of {rounds.name}", value, count)


def _wake_all(requests: list[ActiveRequest]) -> None:
    for request in requests:
        waiter, request.waiter = request.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _start_thread(engine: Engine) -> threading.Event:
    """Start the thread of an engine; return the event that wakes it. The thread ends with the engine."""
    wake = threading.Event()
    ref = weakref.ref(engine, lambda _: wake.set())

    def work() -> None:
        while True:
            wake.wait()
            wake.clear()
            current = ref()
            if current is None:
                return
            current.run_in_thread()
            del current

    start_daemon("daskserve-steps", work)
    return wake
