"""The runner that forwards whole requests to a child process.

A request takes a slot before it is sent to the child, and releases it when the child's answer is complete. A
cancelled request gets no answer. So the actor waits until the child reports the end of its code (verb
``ended``), and only then releases the slot. So the child never runs more requests than it has slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from daskserve.cluster.worker.child import ChildProcess
from daskserve.common.types import ActorRequest, Message
from daskserve.data.replica.execution.runner import CodeRun, RunListener, Runs
from daskserve.errors import ActorLostError, RequestTimeoutError, ServeError
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.replica")


class ChildRun(CodeRun):
    """One request in the child, whose messages pass through the task that awaits `drive`.

    Cancelling that task cancels the request; its code may end later.
    """

    __slots__ = ("_runner",)

    def __init__(
        self,
        runner: ChildRunner,
        function: Callable[..., ActorRequest],
        args: tuple[Any, ...],
        context: Context,
        listener: RunListener,
    ) -> None:
        super().__init__(runner.runs, function, args, context, listener)
        self._runner = runner

    def drive(self) -> Awaitable[None]:
        return self._carry()

    async def _carry(self) -> None:
        number, envelope, receive, send = self._args
        is_broken = False

        async def pass_on(message: Message) -> None:
            nonlocal is_broken
            try:
                await send(message)
            except BaseException:
                is_broken = True
                raise

        try:
            load = await self._function(number, envelope).respond(receive, pass_on)
        except ActorLostError as error:
            lost = error
        except BaseException as error:
            # If the caller has left or the deadline has passed, code may still run in the child.
            if is_broken or isinstance(error, (asyncio.CancelledError, RequestTimeoutError)):
                self._runner.settle(number, self)
                raise
            if not isinstance(error, Exception):
                self._end(None, None)
                raise
            self._end(None, error)
            return
        else:
            self._end(load, None)
            return
        try:
            lost = await self._runner.explain(lost)
        finally:
            self._end(None, lost)

    def _stop(self) -> None:
        pass  # the task is cancelled together with the run, which cancels the request

    def settled(self) -> None:
        """Record that the child's code has ended."""
        self._end(None, None)


class ChildRunner:
    """Runs requests in a child process.

    Parameters
    ----------
    explain : callable
        ``await explain(error)`` returns the error for the caller of a lost request.
    is_shared : callable
        Returns whether the child also gets requests from its own listeners; then requests may wait there.
    """

    def __init__(
        self,
        child: ChildProcess,
        explain: Callable[[ActorLostError], Awaitable[ActorLostError]],
        is_shared: Callable[[], bool] = bool,
    ) -> None:
        self.runs = Runs()
        self.is_shared = is_shared
        self.explain = explain
        self._child = child
        self._settling = TaskSet(logger)

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: RunListener
    ) -> ChildRun:
        """Prepare a request to the child; see `daskserve.data.replica.execution.runner`.

        ``function`` is `ChildProcess.request`. An error of user code ends the run; it is passed on packed.
        """
        run = ChildRun(self, function, args, context, on_end)
        self.runs.add(run)
        return run

    def settle(self, number: int, run: ChildRun) -> None:
        """End a cancelled run as soon as the child's code has ended."""
        self._settling.spawn(self._settle(number, run), "isolation-settle")

    async def close(self) -> None:
        """Return when all cancelled runs have ended; the child must have ended before."""
        await self._settling.wait()

    async def _settle(self, number: int, run: ChildRun) -> None:
        try:
            await self._child.call("ended", number=number)
        except ServeError:
            pass  # the child and its code have ended
        finally:
            run.settled()
