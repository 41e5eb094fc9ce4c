"""Packs errors of user code in threads, with a timeout, if packing may run code of their classes.

Most errors are packed where user code raises them, in a fraction of a millisecond
(`daskserve.payload.packed_errors.pack_now`). But the ``__str__`` or ``__reduce__`` of a user's class may
hang, and on the worker's loop even reading the source lines of a traceback takes too long. These errors are
packed in threads. After the timeout, the caller gets the name of the class and the plain values of the error.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

from daskserve.data.replica.errors.rules import add_rule
from daskserve.data.replica.execution.runner import CodeRun, Runs
from daskserve.data.replica.execution.user_threads import UserThreads
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.payload.packed_errors import PackedError, pack_in_steps, pack_without_code

#: The timeout for packing an error.
PACK_S = 2.0
#: The number of threads that pack errors, and the maximum number of threads that replace stuck ones.
THREADS = 4
MAX_STUCK = 16


class ErrorPackers:
    """The threads that pack the errors of one replica's user code.

    Parameters
    ----------
    timeout_s : float
        The timeout for packing an error.
    """

    def __init__(self, name: str, to_worker: ThreadCalls, timeout_s: float = PACK_S) -> None:
        self._threads = UserThreads(name, THREADS, to_worker, Runs())
        self._timeout_s = timeout_s

    def pack(self, error: BaseException, context: Context) -> asyncio.Future[PackedError]:
        """Return a future of the worker's loop for an error, packed in a copy of the code's context."""
        loop = asyncio.get_running_loop()
        packed: asyncio.Future[PackedError] = loop.create_future()
        if type(error) is PackedError:
            packed.set_result(error)
            return packed
        add_rule(error)
        packing = _Packing(error, packed)
        timer = loop.call_later(self._timeout_s, self._give_up, packing)
        packed.add_done_callback(lambda _: timer.cancel())
        packing.run = self._start(packing, context.copy())
        return packed

    def _start(self, packing: _Packing, context: Context) -> CodeRun:
        threads = self._threads
        threads.limit = THREADS + min(threads.abandoned, MAX_STUCK)
        return threads.start(packing.pack, (), context, packing)

    def _give_up(self, packing: _Packing) -> None:
        packing.deliver()
        if packing.run is not None:
            packing.run.cancel()
            # Other errors may wait behind this one, and threads are added only when a run starts.
            self._start(_Packing(None, packing.packed), Context())

    async def close(self, grace_s: float) -> bool:
        """End the threads, and return whether they ended within ``grace_s``."""
        return await self._threads.close(grace_s)


class _Packing:
    """One error in a thread; a `daskserve.data.replica.execution.runner.RunListener`."""

    __slots__ = ("_error", "_latest", "packed", "run")

    def __init__(self, error: BaseException | None, packed: asyncio.Future[PackedError]) -> None:
        self._error = error
        #: The result of the last step of packing.
        self._latest: PackedError | None = None
        self.packed = packed
        self.run: CodeRun | None = None

    def pack(self) -> None:
        """Pack the error; in a thread."""
        error = self._error
        if error is None:
            return
        try:
            for packed in pack_in_steps(error):
                self._latest = packed
                if self._error is None:
                    return  # packing took too long
        except BaseException:  # user code may raise any error; `_latest` has the result so far
            pass

    def run_ended(self, value: Any, error: Exception | None) -> None:
        self.run = None  # the run refers to this object
        self.deliver()

    def run_aborted(self, error: Exception) -> None:
        self.deliver()

    def deliver(self) -> None:
        """Deliver the result so far; on the worker's loop."""
        if self._error is not None and not self.packed.done():
            self.packed.set_result(pack_without_code(self._error, self._latest))
        self._error = None  # a stuck thread must not keep the error alive
