"""One request at its replica, as a state machine.

A replica answers calls, streaming calls, HTTP requests and WebSockets, alone or in batches. A runner runs
user code (`daskserve.data.replica.execution.runner`). Without a task, the caller gets the answer when user
code ends (`ReplicaRequest.start`). A task responds (`ReplicaRequest.respond`) if the request may have to
wait: for a slot, for its body, or for a caller that reads a stream slowly. All requests have the same states:
see `daskserve.data.replica.requests.states`.

The request holds its slot until it is DONE, even if its caller has left before. So a replica never runs more
requests than it has slots, and code that cannot be stopped is visible. User code is cancelled once, when the
request becomes CANCELLED. The request is counted once, when it leaves RUNNING or STREAMING.

`ReplicaRequest.leave` alone decides what happens when the caller leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, NoReturn

from daskserve.common.clock import stopwatch
from daskserve.common.types import Envelope, Load, Message, OnAnswer, Receive, Send
from daskserve.context import RequestContext, current_request
from daskserve.data.replica.errors.log import is_failure
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.execution.runner import CodeRun
from daskserve.data.replica.requests.serving import ServingCode
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.requests.states import (
    ABORTED,
    ANSWERED,
    ANSWERED_STATE,
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    GRANTED,
    GRANTED_STATE,
    LATE,
    LEFT,
    NEXT,
    OPEN_STATES,
    PARTIAL,
    REFUSED,
    WAITING,
    RequestEvent,
    RequestState,
)
from daskserve.data.replica.user_code.definitions import Method
from daskserve.data.replica.user_code.request_objects import request_id_of
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.errors import ServeError
from daskserve.loops.deadlines import is_over
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.replica import ReplicaMetrics

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan


class InvalidRequestTransition(ServeError):
    """An event is not allowed in a request's state, which is a bug in the replica."""


class ReplicaRequest:
    """One request at its replica; each kind of request is a subclass.

    It is a `daskserve.common.types.ActorRequest` for its caller, and a
    `daskserve.data.replica.execution.runner.RunListener` for user code. It lives on the worker's loop.
    """

    __slots__ = (
        "_began",
        "_on_answer",
        "_receive",
        "_send",
        "_waiter",
        "envelope",
        "error",
        "holds",
        "is_in_task",
        "metrics",
        "pipe",
        "run",
        "slots",
        "state",
        "survives_caller",
        "unfinished",
        "value",
    )

    # Those of the caller, for a pipe that only the `unfinished` step needs.
    _receive: Receive | None
    _send: Send | None
    #: Whether the `unfinished` step needs a task.
    needs_task_to_go_on = False

    def __init__(self, envelope: Envelope, slots: Slots, metrics: ReplicaMetrics) -> None:
        self.envelope = envelope
        self.slots = slots
        self.metrics = metrics
        self.state: RequestState = WAITING
        #: Called with the answer of a request without a task.
        self._on_answer: OnAnswer | None = None
        #: Awaited by the task of a request: done when there is a message to send, or user code has ended.
        self._waiter: asyncio.Future[None] | None = None
        #: Carries the messages between user code and the caller, if there are any.
        self.pipe: MessagePipe | None = None
        #: Whether a task responds.
        self.is_in_task = False
        #: The next step of user code, until it is started.
        self.unfinished: Unfinished | None = None
        #: Why the caller gets no answer.
        self.error: Exception | None = None
        #: The run of the request's user code, which holds the slot.
        self.run: CodeRun | None = None
        #: The result of user code.
        self.value: Any = None
        #: Whether user code continues when its caller leaves.
        self.survives_caller = False
        #: The number of other runs that hold the slot, such as the run of its batch.
        self.holds = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state}>"

    # ---- for the caller

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        """Answer the request without a task, and return a function that cancels it.

        Returns None if the request needs a task, or there is no free slot. If the answer takes more than one
        message, the callback gets this object, and a task has to call `respond`.
        """
        if self.needs_task() or not self.slots.take_nowait(self.envelope):
            return None
        self.granted()
        self._on_answer = on_answer
        try:
            self.begin()
        except BaseException:
            self.fail()
            raise
        return self.leave

    async def respond(self, receive: Receive, send: Send) -> Load:
        """Answer the request from the current task; return once its caller has the whole answer.

        Raises
        ------
        ReplicaBusyError
            All slots were taken for longer than the timeout of the request; it has not begun.
        ActorLostError
            The replica stops: the request has not begun, or was cancelled when the grace period ended.
        Exception
            The error of user code, of its start, or of the connection to the caller.
        """
        slots = self.slots
        try:
            if self.state == WAITING:
                # Full replicas also accept broadcasts.
                envelope = self.envelope
                takes = envelope.queue_timeout is None and (
                    slots.take_beyond() if "broadcast" in envelope.head else slots.take_nowait(envelope)
                )
                if not takes:
                    await slots.take(envelope, send)
                self.granted()
            self.is_in_task = True
            if self.unfinished is None:
                preparing = self.begin(receive, send)
                if preparing is not None:
                    await preparing
            elif self.pipe is not None:
                self.pipe.connect(receive, send)
            else:
                self._receive, self._send = receive, send
            if self.run is not None or self.pipe is not None or self.unfinished is not None:
                await _settle(self)
            if self.error is not None:
                _raise_error(self)
            message = self.message(self.value)
            if message is not None:
                await send(message)
        except Exception:
            self.fail()
            raise
        except BaseException:
            self.leave(asyncio.get_running_loop().time())
            raise
        self.answered()
        return slots.load()

    # ---- methods that each kind of request defines

    def needs_task(self) -> bool:
        """Return whether only a task can respond, because the request may have to wait."""
        return True

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        """Start user code and return None, or return an awaitable that starts it.

        Without a task, ``receive`` and ``send`` are None, and the result must be None.
        """
        raise NotImplementedError

    def resume(self, unfinished: Unfinished) -> None:
        """Start the next step of user code."""
        raise NotImplementedError

    def message(self, value: Any) -> Message | None:
        """Return the last message to the caller, given the result of user code."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the resources of the request; its caller gets no more messages."""
        pipe, self.pipe = self.pipe, None  # the pipe refers to this object
        if pipe is not None:
            pipe.close()

    # ---- events

    def granted(self) -> None:
        """The request has its slot."""
        if self.state == WAITING:  # the same as `_move`, without an additional call per request
            self.state = GRANTED_STATE
        else:
            self._move(GRANTED)
        self.metrics.handled += 1
        self._began = stopwatch()

    def partial(self) -> None:
        """User code has sent a message."""
        if self.state in OPEN_STATES:
            self._move(PARTIAL)
            _changed(self)

    def run_ended(self, value: Any, error: Exception | None) -> None:
        """User code, or one step of it, has ended."""
        self.run = None
        if self.state == CANCELLED:
            self._free_if_ended()
            return
        if error is not None:
            self.accept(error)
        elif type(value) is Unfinished:
            self.accept(value)
        else:
            self.value = value
        _changed(self)

    def run_aborted(self, error: Exception) -> None:
        """The replica stops: the caller gets ``error``, and user code is cancelled."""
        if self.state in OPEN_STATES:
            on_answer = self._on_answer
            self.error = error
            self._close(ABORTED)
            self._on_answer = on_answer
            _changed(self)

    def answered(self) -> None:
        """The caller has the whole answer."""
        if self.state in OPEN_STATES:  # the same as `_move`, without an additional call per request
            self.state = ANSWERED_STATE
        else:
            self._move(ANSWERED)
        self._on_answer = None  # it may refer to this object
        self.metrics.latency.observe(stopwatch() - self._began)
        if self.pipe is not None:
            self.release()
        self.slots.free(self.envelope)

    def fail(self) -> None:
        """The caller gets an error, or the request got no slot; cancel user code if it still runs."""
        if self.state == WAITING:
            self._close(REFUSED)
        elif self.state in OPEN_STATES:
            self._close(FAILED if self.run is None and not self.holds else ABORTED)

    def leave(self, now: float | None = None) -> None:
        """The caller has left, or the deadline has passed: drop the answer, and cancel user code.

        User code continues if its response is complete, as in a background task, or if it survives its
        caller. No other code decides what happens when a caller leaves.
        """
        if self.state in OPEN_STATES or self.state == WAITING:
            is_late = now is not None and is_over(self.envelope.deadline, now)
            self._close(LATE if is_late else LEFT)

    # ---- for the kinds of request

    def hold(self) -> Callable[[], None]:
        """Keep the slot for another run than the request's own; return a function that releases it."""
        self.holds += 1
        return self._unhold

    def _unhold(self) -> None:
        self.holds -= 1
        if self.state == CANCELLED:
            self._free_if_ended()

    def accept(self, value: Any) -> None:
        """Store the result or the error of user code."""
        if type(value) is Unfinished:
            self._move(PARTIAL)
            self.unfinished = value
        elif isinstance(value, Exception):
            self.error = value
        else:
            self.value = value

    # ---- transitions

    def _move(self, event: RequestEvent) -> None:
        state = NEXT[self.state].get(event)
        if state is None:
            raise InvalidRequestTransition(f"{self!r} cannot take the event {event!r}.")
        self.state = state

    def _close(self, event: RequestEvent) -> None:
        """Apply an event after which the caller gets no answer."""
        was_begun = self.state != WAITING
        self._move(event)
        self._on_answer = None  # it may refer to this object
        if not was_begun:
            return
        if event in (LEFT, LATE):
            self.metrics.give_up(is_late=event == LATE)
        else:
            self.metrics.failed += 1
        self.metrics.latency.observe(stopwatch() - self._began)
        if self.state == DONE:
            self.release()
            self.slots.free(self.envelope)
            return
        pipe = self.pipe
        is_left_to_run = (event == LEFT and self.survives_caller) or (
            pipe is not None and pipe.missing_bytes == 0
        )
        if self.run is not None and not is_left_to_run:
            self.run.cancel()  # first, because code that reads must be cancelled, not receive a disconnect
        self.release()
        self._free_if_ended()

    def _free_if_ended(self) -> None:
        if self.state == CANCELLED and self.run is None and not self.holds:
            self._move(ENDED)
            self.slots.free(self.envelope)


async def _settle(request: ReplicaRequest) -> None:
    """Send messages and start the steps of user code until only the last message is left."""
    while True:
        pipe = request.pipe
        if pipe is not None and pipe.outbox:
            try:
                await pipe.flush()
            except OSError:  # raised by the caller's connection
                request.leave()
                raise
        elif request.error is not None:
            return
        elif request.unfinished is not None:
            _take_next_step(request)
        elif request.run is not None:
            code = request.run.drive()
            if code is None:
                code = request._waiter = asyncio.get_running_loop().create_future()
            await code
        else:
            return


def _take_next_step(request: ReplicaRequest) -> None:
    unfinished, request.unfinished = request.unfinished, None
    assert unfinished is not None
    request.resume(unfinished)


def _raise_error(request: ReplicaRequest) -> NoReturn:
    error, request.error = request.error, None
    assert error is not None
    try:
        raise error
    finally:
        del error  # otherwise the traceback refers to this frame, and this frame to the error


def _changed(request: ReplicaRequest) -> None:
    """Wake the task. Without a task, send the answer if it is complete, or start the next step."""
    on_answer = request._on_answer
    if on_answer is None:
        if request._waiter is not None and not request._waiter.done():
            request._waiter.set_result(None)
        return
    if request.unfinished is not None and request.needs_task_to_go_on:
        request._on_answer = None
        on_answer(None, request)
        return
    try:
        if request.unfinished is not None:
            _take_next_step(request)
            return
        message = None if request.error is not None else request.message(request.value)
    except Exception as error:  # the caller gets the error
        request.error = error
    if request.error is None:
        request.answered()
        on_answer(message, request.slots.load())
    else:
        _answer_error(request, on_answer)


def _answer_error(request: ReplicaRequest, on_answer: OnAnswer) -> None:
    # It is not raised here, because its traceback would refer to frames that refer to it, and keep the
    # request.
    error, request.error = request.error, None
    assert error is not None
    request.fail()
    request._on_answer = None
    on_answer(None, error)


class LocalRequest(ReplicaRequest):
    """A request whose user code runs in this process."""

    __slots__ = ("_method", "code", "context", "runs_in_task")

    #: Whether the request has a trace context; see `daskserve.data.replica.requests.traced`.
    is_traced = False
    #: The request's span, if it is sampled.
    span: RecordedSpan | None = None

    # Set by `daskserve.data.replica.local_code.LocalCode.handle`: a constructor would add a call to each
    # request.
    code: ServingCode
    #: Returns whether an error of user code is for the log.
    is_failure: Callable[[PackedError], bool] = staticmethod(is_failure)
    #: Returns the `RequestContext` of user code.
    request_context: Callable[[Envelope], RequestContext]
    # Whether async code runs in the task that responds, on the worker's loop. Set when user code begins.
    runs_in_task: bool
    context: Context
    _method: Method

    def accept(self, value: Any) -> None:
        """Store the result or the error of user code; log an error in the context of the code."""
        super().accept(value)
        if type(value) is PackedError:
            if self.is_failure(value):
                log = self.code.failures.logs_for(self.context.get(current_request))
                self.context.copy().run(log, value, request_id_of(self.envelope.head))
            value.error = None  # the error refers to the user's object

    def start_code(self, is_async: bool, function: Callable[..., Any], *args: Any) -> None:
        """Start user code or its next step."""
        executor = self.code.executor
        if is_async and self.runs_in_task:
            self.run = executor.enter(function, args, self.context, self)
        elif is_async or executor.is_closed:
            self.run = executor.start(is_async, function, args, self.context, self)
        else:  # the same as `start`, without an additional call per request
            self.run = executor.threads.start(function, args, self.context, self)


def set_context(request: LocalRequest) -> None:
    """Create the context in which user code answers a request: a copy of the replica's."""
    request.context = context = request.code.executor.context.copy()
    context.run(current_request.set, request.request_context(request.envelope))


def start_next(request: LocalRequest, is_async: bool, function: Callable[..., Any], *args: Any) -> None:
    """Start the next step of user code, in a copy of its context, because the last run may still use the
    context."""
    request.context = request.context.copy()
    request.start_code(is_async, function, *args)
