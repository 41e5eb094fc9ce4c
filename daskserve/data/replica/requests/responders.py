"""The two paths to the caller of a request: from a task, and without one.

`daskserve.data.replica.requests.answer.Answer` decides what happens to a request; this module only connects
it to the outside. A task is needed where something waits: for a slot, for the body of a request, or for a
caller that reads a stream slowly. All other requests are answered where user code reports its end, without a
task.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from daskserve.common.clock import Clock
from daskserve.common.types import Load, OnAnswer, Receive, Send
from daskserve.data.replica.requests.answer import WAITING, Answer


async def carry(answer: Answer, receive: Receive, send: Send, clock: Clock) -> Load:
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
    slots = answer.slots
    if answer.state == WAITING:
        if answer.envelope.patience is not None or not _take_slot(answer):
            await _wait_for_slot(answer, send, clock)
        answer.granted()
    answer.is_in_task = True
    try:
        if answer.unfinished is None:
            preparing = answer.begin(receive, send)
            if preparing is not None:
                await preparing
        elif answer.pipe is not None:
            answer.pipe.connect(receive, send)
        if answer.run is not None or answer.pipe is not None or answer.unfinished is not None:
            await _settle(answer)
        if answer.error is not None:
            _raise_error(answer)
        message = answer.message(answer.value)
        if message is not None:
            await send(message)
    except Exception:
        answer.fail()
        raise
    except BaseException:
        answer.leave(clock.now())
        raise
    answer.answered()
    return slots.load()


def _take_slot(answer: Answer) -> bool:
    slots = answer.slots
    # A broadcast reaches full replicas, too.
    return slots.take_beyond() if "broadcast" in answer.envelope.head else slots.take_nowait()


async def _wait_for_slot(answer: Answer, send: Send, clock: Clock) -> None:
    try:
        await answer.slots.take(answer.envelope, send)
    except asyncio.CancelledError:
        answer.leave(clock.now())
        raise
    except Exception:
        answer.fail()
        raise


async def _settle(answer: Answer) -> None:
    """Pass messages on and start the steps of user code until only the last message is left."""
    answer.caller = waiting = TaskCaller()
    while True:
        pipe = answer.pipe
        if pipe is not None and pipe.outbox:
            try:
                await pipe.flush()
            except OSError:  # of the caller's connection
                answer.leave()
                raise
        elif answer.error is not None:
            return
        elif answer.unfinished is not None:
            _take_next_step(answer)
        elif answer.run is not None:
            code = answer.run.drive()
            await (waiting.wait() if code is None else code)
        else:
            return


def _take_next_step(answer: Answer) -> None:
    unfinished, answer.unfinished = answer.unfinished, None
    assert unfinished is not None
    answer.go_on(unfinished)


def _raise_error(answer: Answer) -> NoReturn:
    error, answer.error = answer.error, None
    assert error is not None
    try:
        raise error
    finally:
        del error  # else the traceback holds this frame, and this frame the error


class TaskCaller:
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


class TasklessCaller:
    """Passes the answer to the caller where user code reports its end, without a task.

    If the answer takes more than one message, it becomes a `daskserve.common.types.Rest`, for a task to
    carry.
    """

    __slots__ = ("_answer", "_clock", "_is_handed_over", "_on_answer")

    def __init__(self, answer: Answer, clock: Clock, on_answer: OnAnswer) -> None:
        self._answer = answer
        self._clock = clock
        self._on_answer = on_answer
        self._is_handed_over = False

    def start(self) -> None:
        """Start user code; the request has taken its slot."""
        answer = self._answer
        answer.granted()
        answer.caller = self
        try:
            answer.begin()
        except BaseException:
            answer.fail()
            raise

    def give_up(self) -> None:
        """Cancel user code unless it has ended; the caller has left."""
        if not self._is_handed_over:
            self._answer.leave()

    def changed(self) -> None:
        """Pass the answer on if it is complete, or start the next step."""
        answer = self._answer
        if answer.unfinished is not None and answer.needs_task_to_go_on:
            answer.caller = None
            self._is_handed_over = True
            self._on_answer(None, self)
            return
        try:
            if answer.unfinished is not None:
                _take_next_step(answer)
                return
            if answer.error is not None:
                _raise_error(answer)
            message = answer.message(answer.value)
        except Exception as error:  # the caller gets it
            answer.fail()
            self._on_answer(None, error)
        else:
            answer.answered()
            self._on_answer(message, answer.slots.load())

    # ---- the rest

    async def carry(self, receive: Receive, send: Send) -> Load:
        return await carry(self._answer, receive, send, self._clock)

    def drop(self) -> None:
        self._answer.leave()
