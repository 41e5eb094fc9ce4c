"""Runners: where user code runs, and how it is cancelled.

``runner.start(function, args, context, listener)`` starts user code in a context, and notifies the listener
exactly once when the code has ended. It returns the `CodeRun`, by which the code can be cancelled:

====================  =======================================================  ==========================
runner                where the code runs                                      how it is cancelled
====================  =======================================================  ==========================
`UserLoop`            async code, on the user-code loop, in its own thread     ``Task.cancel``
`UserThreads`         plain functions, in user-code threads                    it is not: it is abandoned
`LoopThread`          plain functions, in the thread of the user-code loop     it is not: it is abandoned
`LoopRunner`          async code, on the worker's event loop                   ``Task.cancel``
`ChildRunner`         a whole request, in a child process                      by a frame to the child
====================  =======================================================  ==========================

`daskserve.data.replica.execution.executor.UserExecutor` chooses among the first four. Code that starts a run
does not know which runner it has: it only uses the `CodeRun`, and is notified of its end as a `RunListener`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, Protocol, TypeAlias

from daskserve.context import current_request
from daskserve.data.replica.errors.log import pack_raised
from daskserve.payload.packed_errors import PackedError


class RunListener(Protocol):
    """The object that started a run. Its methods are called on the worker's loop."""

    def run_ended(self, value: Any, error: Exception | None) -> None:
        """Record that the code has ended, or will never begin. Called exactly once for each run.

        ``value`` is its result, and ``error`` its packed error. Ignore both if the run was cancelled. After
        a cancellation, this call may come much later.
        """

    def run_aborted(self, error: Exception) -> None:
        """Fail with ``error`` without waiting for the code, whose run is cancelled and ends later."""


#: Packs an error of user code, on the worker's loop; see `execution.error_packing.ErrorPackers.pack`.
PackError: TypeAlias = Callable[[BaseException, Context], asyncio.Future[PackedError]]


class Runs(set["CodeRun"]):
    """The runs that have started and not ended.

    Parameters
    ----------
    pack : callable, optional
        Packs errors that cannot be packed at once by the thread of a run.
    """

    pack: PackError

    def __init__(self, pack: PackError | None = None) -> None:
        super().__init__()
        if pack is not None:
            self.pack = pack


class CodeRun:
    """One run of user code, as seen from the worker's loop.

    Parameters
    ----------
    runs : Runs
        The runs of the same executor; the run removes itself when it ends.
    """

    __slots__ = (
        "_args",
        "_context",
        "_function",
        "_listener",
        "_runs",
        "is_cancelled",
        "is_ended",
    )

    def __init__(
        self,
        runs: Runs,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context,
        listener: RunListener,
    ) -> None:
        self._runs = runs
        self._function = function
        self._args = args
        self._context = context
        self._listener = listener
        self.is_cancelled = False
        self.is_ended = False

    @property
    def context(self) -> Context:
        """The context variables of the code."""
        return self._context

    def drive(self) -> Awaitable[None] | None:
        """Return an awaitable that the listener's task has to await so that the code runs; None if there is
        none."""
        return None

    def cancel(self) -> None:
        """Cancel the code and the calls that it waits for, unless it has ended."""
        if not self.is_ended and not self.is_cancelled:
            self.is_cancelled = True
            self._stop()
            # After the code itself, because code that awaits one of its calls must be cancelled once, not
            # twice.
            request = self._context.get(current_request)
            if request is not None:
                request.cancel_calls()

    def abort(self, error: Exception) -> None:
        """Cancel the code, and fail its listener with ``error`` at once."""
        if not self.is_ended:
            self._listener.run_aborted(error)
            self.cancel()

    def _stop(self) -> None:
        raise NotImplementedError

    def _fail(self, error: BaseException, post: Callable[..., None]) -> None:
        """End with an error of user code, in its thread; ``post`` calls a function on the worker's loop."""
        packed = None if self.is_cancelled else pack_raised(error)
        if self.is_cancelled or packed is not None:
            post(self._end, None, packed)
        else:
            post(self._pack, error)

    def _pack(self, error: BaseException) -> None:
        packing = self._runs.pack(error, self._context)
        packing.add_done_callback(lambda packed: self._end(None, packed.result()))

    def _end(self, value: Any, error: Exception | None) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        listener, self._args = self._listener, ()
        # releases the request, because the task or thread may keep this object for a moment
        del self._listener
        self._runs.discard(self)
        listener.run_ended(value, error)


class RunResult:
    """A `RunListener` for code that awaits one run; see `UserExecutor.run_async`."""

    __slots__ = ("_ended", "_error", "_value")

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._value: Any = None
        self._error: Exception | None = None

    def run_ended(self, value: Any, error: Exception | None) -> None:
        if type(error) is PackedError:
            error.error = None  # the error refers to the user's object
        if not self._ended.done():
            self._value, self._error = value, error
            self._ended.set_result(None)

    def run_aborted(self, error: Exception) -> None:
        self.run_ended(None, error)

    async def wait(self, run: CodeRun | None) -> Any:
        """Return the result of the run or raise its error; a cancellation cancels the run."""
        try:
            await self._ended
        except asyncio.CancelledError:
            if run is not None:
                run.cancel()
            raise
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # otherwise the traceback refers to this frame, and this frame to the error
