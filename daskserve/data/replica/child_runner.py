"""The runner that has a child process answer a whole request.

A slot is taken before a request is sent to the child and free when the child's answer is complete. For a
request that was given up there is no answer to wait for, so the child is asked when its code has ended
(verb ``ended``); only then another request may take its place. So the child never has more to do than it has
slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from daskserve.cluster.worker.child import ChildProcess
from daskserve.data.replica.runner import CodeRun, RunListener
from daskserve.errors import ActorLostError, RequestTimeoutError, ServeError
from daskserve.loops.tasks import TaskSet
from daskserve.payload import PackedError
from daskserve.types import Message, Send

logger = logging.getLogger("daskserve.replica")

#: The type of the message that carries an error of user code out of the child.
PACKED = "daskserve.error"


class ChildRun(CodeRun):
    """One request in the child, carried by the task that drives it.

    Cancelling that task cancels the request; its code may end later.
    """

    __slots__ = ("_number", "_runner", "passage")

    def __init__(
        self,
        runner: ChildRunner,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        context: Context,
        listener: RunListener,
    ) -> None:
        super().__init__(runner.runs, function, args, context, listener)
        self._runner = runner
        number, envelope, receive, send = args
        self._number: int = number
        #: What the child has sent.
        self.passage = Passage(send)
        self._args = (number, envelope, receive, self.passage.send)

    def drive(self) -> Awaitable[None]:
        return self._carry()

    async def _carry(self) -> None:
        try:
            load = await self._function(*self._args)
        except ActorLostError as error:
            lost = error
        except BaseException as error:
            # What the child gave up at its deadline may have left code that runs on, too.
            if self.passage.is_broken or isinstance(error, (asyncio.CancelledError, RequestTimeoutError)):
                self._runner.settle(self._number, self)
                raise
            if not isinstance(error, Exception):
                self._end(None, None)
                raise
            self._end(None, error)
            return
        else:
            packed = self.passage.packed
            self._end(load, None if packed is None else PackedError(packed))
            return
        try:
            lost = await self._runner.explain(lost)
        finally:
            self._end(None, lost)

    def _stop(self) -> None:
        pass  # the task is cancelled together with the run, and with it the request

    def settled(self) -> None:
        """Note that the child's code has ended after all."""
        self._end(None, None)


class ChildRunner:
    """Has a child process answer requests.

    Parameters
    ----------
    explain : callable
        ``await explain(error)`` returns the error for the caller of a lost request.
    """

    def __init__(
        self, child: ChildProcess, explain: Callable[[ActorLostError], Awaitable[ActorLostError]]
    ) -> None:
        self.runs: set[CodeRun] = set()
        self.explain = explain
        self._child = child
        self._settling = TaskSet(logger)

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: RunListener
    ) -> ChildRun:
        """Prepare a request to the child; see `daskserve.data.replica.runner.Runner`.

        ``function`` is `ChildProcess.request`. An error of user code ends the run with a `PackedError`.
        """
        run = ChildRun(self, function, args, context, on_end)
        self.runs.add(run)
        return run

    def settle(self, number: int, run: ChildRun) -> None:
        """End a run that was given up as soon as the child's code has ended."""
        self._settling.spawn(self._settle(number, run), "isolation-settle")

    async def close(self) -> None:
        """Return when all runs that were given up have ended; the child has to be gone."""
        await self._settling.wait()

    async def _settle(self, number: int, run: ChildRun) -> None:
        try:
            await self._child.call("ended", number=number)
        except ServeError:
            pass  # the child is gone, and the request with it
        finally:
            run.settled()


class Passage:
    """The way out of the child for one request: passes messages on and keeps the error among them."""

    __slots__ = ("_send", "is_broken", "packed")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.packed: bytes | None = None
        #: Whether the caller failed to take a message; the child has been told to stop then.
        self.is_broken = False

    async def send(self, message: Message) -> None:
        if message["type"] == PACKED:
            self.packed = message["error"]
            return
        try:
            await self._send(message)
        except BaseException:
            self.is_broken = True
            raise
