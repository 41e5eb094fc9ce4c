"""The answer to one request, as a state machine.

A replica answers calls, streaming calls, HTTP requests and WebSockets, alone or in batches. User code runs
where its runner puts it (`daskserve.data.replica.execution.runner`), and the caller is reached either from a
task or without one (`daskserve.data.replica.requests.responders`). What happens to a request in between is
the same for all:

============  ====================  ============  ========================================================
state         event                 next state    what happened
============  ====================  ============  ========================================================
WAITING       GRANTED               RUNNING       the request got a slot: from here on it counts as begun
WAITING       REFUSED               DONE          there was no slot in time, or the replica stopped
WAITING       LEFT, LATE            DONE          the caller did not wait for a slot
RUNNING       PARTIAL               STREAMING     user code sent a message, or needs another step
RUNNING       ANSWERED              DONE          the caller has the whole answer
RUNNING       FAILED                DONE          user code has ended with an error, which the caller has
RUNNING       ABORTED               CANCELLED     the answer failed, but user code has not ended yet
RUNNING       LEFT                  CANCELLED     the caller left
RUNNING       LATE                  CANCELLED     the deadline passed
STREAMING     PARTIAL               STREAMING     the next message or step
STREAMING     ANSWERED, FAILED      DONE          as in RUNNING
STREAMING     ABORTED, LEFT, LATE   CANCELLED     as in RUNNING
CANCELLED     ENDED                 DONE          user code has really ended
============  ====================  ============  ========================================================

The request holds its slot until it is DONE, even if its caller left long ago. So a replica never runs more
requests than it has slots, and code that cannot be stopped is visible. User code is cancelled once, when the
request becomes CANCELLED. The request is counted once, when it leaves RUNNING or STREAMING.

`ReplicaRequest.leave` alone decides what happens when the caller leaves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

from daskserve.common.clock import stopwatch
from daskserve.common.types import Envelope, Message, Receive, Send
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.execution.runner import CodeRun
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.errors import ServeError
from daskserve.loops.deadlines import is_over
from daskserve.telemetry.replica import ReplicaMetrics

# Plain strings, not members of an enum: each request compares several of them.
RequestState: TypeAlias = Literal["waiting", "running", "streaming", "cancelled", "done"]
WAITING: Final = "waiting"
RUNNING: Final = "running"
STREAMING: Final = "streaming"
CANCELLED: Final = "cancelled"
DONE: Final = "done"

RequestEvent: TypeAlias = Literal[
    "granted", "refused", "partial", "answered", "failed", "aborted", "left", "late", "ended"
]
GRANTED: Final = "granted"
REFUSED: Final = "refused"
PARTIAL: Final = "partial"
ANSWERED: Final = "answered"
FAILED: Final = "failed"
ABORTED: Final = "aborted"
LEFT: Final = "left"
LATE: Final = "late"
ENDED: Final = "ended"

TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = {
    (WAITING, GRANTED): RUNNING,
    (WAITING, REFUSED): DONE,
    (WAITING, LEFT): DONE,
    (WAITING, LATE): DONE,
    (RUNNING, PARTIAL): STREAMING,
    (RUNNING, ANSWERED): DONE,
    (RUNNING, FAILED): DONE,
    (RUNNING, ABORTED): CANCELLED,
    (RUNNING, LEFT): CANCELLED,
    (RUNNING, LATE): CANCELLED,
    (STREAMING, PARTIAL): STREAMING,
    (STREAMING, ANSWERED): DONE,
    (STREAMING, FAILED): DONE,
    (STREAMING, ABORTED): CANCELLED,
    (STREAMING, LEFT): CANCELLED,
    (STREAMING, LATE): CANCELLED,
    (CANCELLED, ENDED): DONE,
}
# The same by state: each request looks up two of them, and two small keys are found sooner than one pair.
_NEXT: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    state: {event: after for (before, event), after in TRANSITIONS.items() if before == state}
    for state in get_args(RequestState)
}
_GRANTED_STATE = TRANSITIONS[WAITING, GRANTED]
_ANSWERED_STATE = TRANSITIONS[RUNNING, ANSWERED]
#: States in which the caller waits for the answer.
OPEN_STATES = frozenset({RUNNING, STREAMING})


class InvalidRequestTransition(ServeError):
    """An event does not fit the state of an answer: a bug in the replica."""


class Responder(Protocol):
    """The path to a request's caller, which an answer notifies of its changes."""

    def changed(self) -> None:
        """Note that there are messages to pass on, or that the answer is complete or has failed."""


class ReplicaRequest:
    """One request at its replica; each kind of request is a subclass.

    It is a `daskserve.data.replica.execution.runner.RunListener`, and lives on the worker's loop.
    """

    __slots__ = (
        "_began",
        "caller",
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

    #: Whether the `unfinished` step needs a task.
    needs_task_to_go_on = False

    def __init__(self, envelope: Envelope, slots: Slots, metrics: ReplicaMetrics) -> None:
        self.envelope = envelope
        self.slots = slots
        self.metrics = metrics
        self.state: RequestState = WAITING
        #: Notified of changes; None while the task that carries the answer is not waiting for any.
        self.caller: Responder | None = None
        #: Carries the messages between user code and the caller, if there are any.
        self.pipe: MessagePipe | None = None
        #: Whether a task carries the answer; only there can anything be awaited.
        self.is_in_task = False
        #: The next step of user code, until it is started.
        self.unfinished: Unfinished | None = None
        #: Why the caller gets no answer.
        self.error: Exception | None = None
        #: The run of its user code, which holds the slot.
        self.run: CodeRun | None = None
        #: What user code returned.
        self.value: Any = None
        #: Whether user code continues when its caller leaves.
        self.survives_caller = False
        #: How many other runs hold the slot: the run of its batch.
        self.holds = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state}>"

    # ---- what a kind of request defines

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        """Start user code and return None, or return an awaitable that starts it.

        Without a task, ``receive`` and ``send`` are None, and the result must be None.
        """
        raise NotImplementedError

    def go_on(self, unfinished: Unfinished) -> None:
        """Start the next step of user code."""
        raise NotImplementedError

    def message(self, value: Any) -> Message | None:
        """Return the last message to the caller, made from what user code returned."""
        raise NotImplementedError

    def release(self) -> None:
        """Release what the request holds; its caller gets nothing more."""
        pipe, self.pipe = self.pipe, None  # it refers to this object
        if pipe is not None:
            pipe.close()

    # ---- events

    def granted(self) -> None:
        """The request has its slot."""
        if self.state == WAITING:  # `_move`, without a call for each request
            self.state = _GRANTED_STATE
        else:
            self._move(GRANTED)
        self.metrics.handled += 1
        self._began = stopwatch()

    def partial(self) -> None:
        """User code has sent a message."""
        if self.state in OPEN_STATES:
            self._move(PARTIAL)
            if self.caller is not None:
                self.caller.changed()

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
        if self.caller is not None:
            self.caller.changed()

    def run_aborted(self, error: Exception) -> None:
        """The replica stops: the caller gets ``error``, and user code is cancelled."""
        if self.state in OPEN_STATES:
            caller = self.caller
            self.error = error
            self._close(ABORTED)
            if caller is not None:
                caller.changed()

    def answered(self) -> None:
        """The caller has the whole answer."""
        if self.state in OPEN_STATES:  # `_move`, without a call for each request
            self.state = _ANSWERED_STATE
        else:
            self._move(ANSWERED)
        self.caller = None  # it refers to this object
        self.metrics.latency.observe(stopwatch() - self._began)
        if self.pipe is not None:
            self.release()
        self.slots.free()

    def fail(self) -> None:
        """The caller gets an error, or the request got no slot; cancel user code if it still runs."""
        if self.state == WAITING:
            self._close(REFUSED)
        elif self.state in OPEN_STATES:
            self._close(FAILED if self.run is None and not self.holds else ABORTED)

    def leave(self, now: float | None = None) -> None:
        """The caller has left, or the deadline has passed: drop the answer, and cancel user code.

        User code continues if its response is complete, as a background task does, or if it survives its
        caller. No other code decides what happens when a caller leaves.
        """
        if self.state in OPEN_STATES or self.state == WAITING:
            is_late = now is not None and is_over(self.envelope.deadline, now)
            self._close(LATE if is_late else LEFT)

    # ---- for the kinds of request

    def hold(self) -> None:
        """Keep the slot until `unhold`, for a run that is not the request's own."""
        self.holds += 1

    def unhold(self) -> None:
        """End a `hold`."""
        self.holds -= 1
        if self.state == CANCELLED:
            self._free_if_ended()

    def accept(self, value: Any) -> None:
        """Keep what user code returned or raised."""
        if type(value) is Unfinished:
            self._move(PARTIAL)
            self.unfinished = value
        elif isinstance(value, Exception):
            self.error = value
        else:
            self.value = value

    # ---- transitions

    def _move(self, event: RequestEvent) -> None:
        state = _NEXT[self.state].get(event)
        if state is None:
            raise InvalidRequestTransition(f"{self!r} cannot take the event {event!r}.")
        self.state = state

    def _close(self, event: RequestEvent) -> None:
        """Apply an event after which the caller gets no answer."""
        was_begun = self.state != WAITING
        self._move(event)
        self.caller = None  # it refers to this object
        if not was_begun:
            return
        if event in (LEFT, LATE):
            self.metrics.give_up(is_late=event == LATE)
        else:
            self.metrics.failed += 1
        self.metrics.latency.observe(stopwatch() - self._began)
        if self.state == DONE:
            self.release()
            self.slots.free()
            return
        pipe = self.pipe
        is_left_to_run = (event == LEFT and self.survives_caller) or (pipe is not None and pipe.is_complete)
        if self.run is not None and not is_left_to_run:
            self.run.cancel()  # first: code that reads must be cancelled, not receive a disconnect
        self.release()
        self._free_if_ended()

    def _free_if_ended(self) -> None:
        if self.state == CANCELLED and self.run is None and not self.holds:
            self._move(ENDED)
            self.slots.free()
