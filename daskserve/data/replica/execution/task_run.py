"""Async code within the task of its request, for backends with ``event_loop="worker"``.

On the worker's loop, a task for user code costs as much as the router's work for a request. Only a request
with a deadline needs a separate task: the code may ignore its cancellation, and the caller continues without
it. Without a deadline, the code runs within the request's task (`TaskRun`). Code that never waits then needs
neither a task nor a run: it has ended when `daskserve.data.replica.execution.executor.UserExecutor.enter`
returns.

A call that needs no task itself gets one for its code
(`daskserve.data.replica.execution.user_loop.LoopRunner`). This takes a third less CPU time within the
process, because routers then need no task for the call either (`daskserve.data.caller.calls.call`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from contextvars import Context
from typing import Any

from daskserve.context import current_request
from daskserve.data.replica.execution.runner import CodeRun, RunListener, Runs
from daskserve.loops.tasks import is_cancelling


class TaskRun(CodeRun):
    """A coroutine on the worker's loop, which runs within the task that awaits it.

    If the client disconnects, that task is cancelled. `abort` cancels the future that the code waits for.
    Code that ignores its cancellation keeps its slot, and its caller keeps waiting.
    """

    __slots__ = ("_code", "_is_aborted", "_must_throw", "_waits_for")

    def __init__(
        self,
        runs: Runs,
        code: Coroutine[Any, Any, Any],
        waits_for: asyncio.Future[Any] | None,
        context: Context,
        listener: RunListener,
    ) -> None:
        super().__init__(runs, code.send, (), context, listener)
        self._code = code
        self._waits_for = waits_for
        self._must_throw = False
        self._is_aborted = False

    def drive(self) -> Awaitable[None]:
        return self

    def __await__(self) -> Generator[Any, Any, None]:
        run, code, waits_for = self._context.run, self._code, self._waits_for
        raised: BaseException
        try:
            while True:
                self._waits_for = waits_for
                try:
                    answer = yield waits_for
                    if self._must_throw:
                        self._must_throw = False
                        raise asyncio.CancelledError
                except BaseException as thrown:  # is thrown into the code
                    try:
                        waits_for = run(code.throw, thrown)
                    finally:
                        self._cancel_calls(thrown)
                else:
                    waits_for = run(code.send, answer)
        except StopIteration as end:
            self._end(end.value, None)
            return
        except BaseException as error:
            kind = type(error)  # `isinstance` may run code of the error's class
            is_left = not self._is_aborted and issubclass(kind, asyncio.CancelledError) and is_cancelling()
            if is_left or issubclass(kind, GeneratorExit):
                self._end(None, None)
                raise
            if self.is_cancelled:
                self._end(None, None)
                return
            raised = error
        try:
            packed = yield from self._runs.pack(raised, self._context)
        except BaseException:  # the task is cancelled, or its coroutine closed
            self._end(None, None)
            raise
        finally:
            del raised  # otherwise the traceback refers to this frame, and this frame to the error
        self._end(None, packed)

    def abort(self, error: Exception) -> None:
        self._is_aborted = True
        super().abort(error)

    def _cancel_calls(self, thrown: BaseException) -> None:
        # After the code itself, because code that awaits one of its calls must be cancelled once, not twice.
        # At this point, a timeout in the code has withdrawn its cancellation.
        if isinstance(thrown, asyncio.CancelledError) and (self.is_cancelled or is_cancelling()):
            request = self._context.get(current_request)
            if request is not None:
                request.cancel_calls()

    def _stop(self) -> None:
        # As `Task.cancel` does; the task itself belongs to the caller.
        if self._waits_for is None or not self._waits_for.cancel():
            self._must_throw = True
