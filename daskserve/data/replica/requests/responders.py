"""The two paths to the caller of a request: from a task, and without one.

`daskserve.data.replica.requests.replica_request.ReplicaRequest` decides what happens to a request; this
module only connects it to the outside. A task is needed where something waits: for a slot, for the body of a
request, or for a caller that reads a stream slowly. All other requests are answered where user code reports
its end, without a task.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from daskserve.common.clock import Clock
from daskserve.common.types import Load, OnAnswer, Receive, Send
from daskserve.data.replica.requests.replica_request import WAITING, ReplicaRequest


async def respond(request: ReplicaRequest, receive: Receive, send: Send, clock: Clock) -> Load:
    """Answer a request from the present task, begun or not; return when its caller has the whole answer.

    Raises
    ------
    ReplicaBusyError
        All slots were taken for longer than the patience of the request; it has not begun.
    ActorLostError
        The replica stops: the request has not begun, or was cancelled when the grace period ended.
    Exception
        The error of user code, of its start, or of the connection to the caller.
    """
    slots = request.slots
    if request.state == WAITING:
        if request.envelope.queue_timeout is not None or not _take_slot(request):
            await _wait_for_slot(request, send, clock)
        request.granted()
    request.is_in_task = True
    try:
        if request.unfinished is None:
            preparing = request.begin(receive, send)
            if preparing is not None:
                await preparing
        elif request.pipe is not None:
            request.pipe.connect(receive, send)
        if request.run is not None or request.pipe is not None or request.unfinished is not None:
            await _settle(request)
        if request.error is not None:
            _raise_error(request)
        message = request.message(request.value)
        if message is not None:
            await send(message)
    except Exception:
        request.fail()
        raise
    except BaseException:
        request.leave(clock.now())
        raise
    request.answered()
    return slots.load()


def _take_slot(request: ReplicaRequest) -> bool:
    slots = request.slots
    # A broadcast reaches full replicas, too.
    return slots.take_beyond() if "broadcast" in request.envelope.head else slots.take_nowait()


async def _wait_for_slot(request: ReplicaRequest, send: Send, clock: Clock) -> None:
    try:
        await request.slots.take(request.envelope, send)
    except asyncio.CancelledError:
        request.leave(clock.now())
        raise
    except Exception:
        request.fail()
        raise


async def _settle(request: ReplicaRequest) -> None:
    """Pass messages on and start the steps of user code until only the last message is left."""
    request.caller = waiting = TaskResponder()
    while True:
        pipe = request.pipe
        if pipe is not None and pipe.outbox:
            try:
                await pipe.flush()
            except OSError:  # of the caller's connection
                request.leave()
                raise
        elif request.error is not None:
            return
        elif request.unfinished is not None:
            _take_next_step(request)
        elif request.run is not None:
            code = request.run.drive()
            await (waiting.wait() if code is None else code)
        else:
            return


def _take_next_step(request: ReplicaRequest) -> None:
    unfinished, request.unfinished = request.unfinished, None
    assert unfinished is not None
    request.go_on(unfinished)


def _raise_error(request: ReplicaRequest) -> NoReturn:
    error, request.error = request.error, None
    assert error is not None
    try:
        raise error
    finally:
        del error  # else the traceback holds this frame, and this frame the error


class TaskResponder:
    """Wakes the task that carries an answer."""

    __slots__ = ("_changed", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        self._changed = self._loop.create_future()
        return self._changed

    def changed(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class TasklessResponder:
    """Passes the answer to the caller where user code reports its end, without a task.

    If the answer takes more than one message, it becomes a `daskserve.common.types.RemainingResponse`, for a
    task to carry.
    """

    __slots__ = ("_clock", "_is_handed_over", "_on_answer", "_request")

    def __init__(self, request: ReplicaRequest, clock: Clock, on_answer: OnAnswer) -> None:
        self._request = request
        self._clock = clock
        self._on_answer = on_answer
        self._is_handed_over = False

    def start(self) -> None:
        """Start user code; the request has taken its slot."""
        request = self._request
        request.granted()
        request.caller = self
        try:
            request.begin()
        except BaseException:
            request.fail()
            raise

    def give_up(self) -> None:
        """Cancel user code unless it has ended; the caller has left."""
        if not self._is_handed_over:
            self._request.leave()

    def changed(self) -> None:
        """Pass the answer on if it is complete, or start the next step."""
        request = self._request
        if request.unfinished is not None and request.needs_task_to_go_on:
            request.caller = None
            self._is_handed_over = True
            self._on_answer(None, self)
            return
        try:
            if request.unfinished is not None:
                _take_next_step(request)
                return
            if request.error is not None:
                _raise_error(request)
            message = request.message(request.value)
        except Exception as error:  # the caller gets it
            request.fail()
            self._on_answer(None, error)
        else:
            request.answered()
            self._on_answer(message, request.slots.load())

    # ---- the rest

    async def respond(self, receive: Receive, send: Send) -> Load:
        return await respond(self._request, receive, send, self._clock)

    def drop(self) -> None:
        self._request.leave()
