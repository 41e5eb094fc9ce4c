"""A program's connection to an instance, until it is closed, and the calls of its clients."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from daskserve.client.instance.calls import ControllerCalls, run_on
from daskserve.client.instance.shutdown import abandon_instance, end_instance
from daskserve.client.views.progress import find_display, wait_visibly, waits_for
from daskserve.client.views.status import Status
from daskserve.cluster.protocols.base import ClientConnection
from daskserve.common.types import GoalId, InstanceName
from daskserve.context import current_replica
from daskserve.data.caller.routing.waiting_calls import wait_until_sent
from daskserve.errors import ClosedError, NotRunningError, ServeError

T = TypeVar("T")

logger = logging.getLogger("daskserve.client")

#: How long an interrupted program waits until its change is undone.
WITHDRAW_S = 10.0


class InstanceConnection:
    """A connection to an instance on a Dask cluster, which several clients may share.

    An owned instance ends when the connection is closed or garbage collected, or when the program ends. A
    program may ignore the result of ``serve.start(...)``. The instance then keeps running, and the module's
    functions use it, unless the program has another instance.

    Parameters
    ----------
    is_guest
        Whether the program only connects to the instance, so that the instance keeps running when the
        client's block ends.
    """

    def __init__(
        self,
        cluster_connection: ClientConnection,
        instance: InstanceName,
        *,
        is_owner: bool = False,
        is_guest: bool = False,
    ) -> None:
        self.cluster_connection = cluster_connection
        self.instance = instance
        self.is_guest = is_guest
        self.is_closed = False
        #: Whether no call is needed to share the instance: it is already shared, or this program started it.
        self.is_shared = instance in cluster_connection.started
        self.calls = ControllerCalls(cluster_connection, instance)
        self._ownership: _Ownership | None = None
        if is_owner:
            self._ownership = _Ownership(self)

    @property
    def is_owner(self) -> bool:
        """Whether the instance ends with this connection."""
        return self._ownership is not None

    def check_open(self) -> None:
        """Raise `ClosedError` if the connection was closed; every use of a client starts with this."""
        if self._ownership is not None:
            self._ownership.is_used = True
        if self.is_closed:
            raise ClosedError("Client has already been shut down.")

    async def leave(self, *, asynchronous: bool) -> None:
        """End a ``with`` block: end the instance if the block's client started it, or leave it running.

        An instance that other programs also use keeps running, unless it is detached.
        """
        if self.is_guest or self.is_owner:
            await self.disconnect(asynchronous=asynchronous)
        else:
            await self.shutdown(asynchronous=asynchronous)

    def become_default(self) -> None:
        """Let `daskserve.run` use this instance in this process; it lives as long as the process."""
        self.cluster_connection.default_instance = self

    async def shutdown(self, *, asynchronous: bool) -> None:
        """End the instance and close the connection. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._ownership is not None:
            self._ownership.detach()
        await end_instance(self.cluster_connection, self.instance, asynchronous=asynchronous, drains=True)

    async def disconnect(self, *, asynchronous: bool) -> None:
        """Close the connection, and its Dask client if daskserve created it.

        An owned instance ends, unless other programs have deployed something on it.
        """
        if self._ownership is not None and not self.is_closed:
            started = self.cluster_connection.started
            if not self.cluster_connection.is_open or await run_on(
                self.cluster_connection, started.is_alone(self.instance), asynchronous=asynchronous
            ):
                await self.shutdown(asynchronous=asynchronous)
            else:
                self._ownership.detach()
        if not self.is_closed:
            self.is_closed = True
            self.cluster_connection.release_default(self.instance)
            await self.cluster_connection.disconnect(self.instance, asynchronous=asynchronous)


class _Ownership:
    """Ends an instance when its owner is garbage collected or the program ends."""

    def __init__(self, owner: InstanceConnection) -> None:
        self._cluster_connection = owner.cluster_connection
        self._instance = owner.instance
        #: Whether a client has used the owner.
        self.is_used = False
        self._finalizer = weakref.finalize(owner, self._collected)
        # weakref's own exit hook may run only after Dask's hook has closed the connection.
        self._finalizer.atexit = False
        atexit.register(self._end)

    def detach(self) -> None:
        """Leave the instance alone from now on."""
        atexit.unregister(self._end)
        self._finalizer.detach()

    def _collected(self) -> None:
        atexit.unregister(self._end)
        if (
            self.is_used
            or not self._cluster_connection.is_open
            or self._cluster_connection.default_instance is not None
        ):
            abandon_instance(self._cluster_connection, self._instance, if_alone=True)
        else:
            InstanceConnection(self._cluster_connection, self._instance, is_owner=True).become_default()

    def _end(self) -> None:
        self.detach()
        abandon_instance(self._cluster_connection, self._instance, if_alone=True)


def this_program() -> str:
    """Return the name of this program for others: its file, process and machine."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "Python"
    return f"{name} (process {os.getpid()} on {socket.gethostname()})"


class Verbs:
    """Base class of the verbs of a client: coroutines that call the instance.

    Parameters
    ----------
    asynchronous : bool
        Whether calls suspend the coroutine. Otherwise they block the thread; see `daskserve.loops.blocking`.
    """

    def __init__(self, connection: InstanceConnection, *, asynchronous: bool) -> None:
        self._connection = connection
        self._asynchronous = asynchronous

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop and return its result."""
        return await run_on(self._connection.cluster_connection, coroutine, asynchronous=self._asynchronous)

    async def _call(self, verb: str, **message: Any) -> Any:
        """Return the controller's answer to a verb."""
        self._connection.check_open()
        return await self._run(self._connection.calls.call(verb, **message))

    async def _call_until(self, deadline: float | None, verb: str, **message: Any) -> Any:
        """Return the controller's answer to a verb; None if it does not arrive before a deadline."""
        self._connection.check_open()
        return await self._run(self._connection.calls.call_until(deadline, verb, **message))

    async def _submit(self, verb: str, **message: Any) -> Any:
        """Return the controller's answer to a verb that changes something, in the name of this program."""
        return await self._call(verb, **message, by=this_program())

    async def _share(self) -> None:
        """Keep the instance when the program that started it ends, because this program deploys on it."""
        connection = self._connection
        connection.check_open()
        if not connection.is_shared and current_replica.get() is None:
            with suppress(NotRunningError, OSError):  # the call that follows raises the right error
                await self._run(
                    connection.cluster_connection.ask("share_instance", instance=connection.instance)
                )
                connection.is_shared = True

    async def _let_calls_leave(self) -> None:
        """Wait until the calls of this process have reached their replicas, before the replicas stop."""
        connection = self._connection
        connection.check_open()
        await self._run(wait_until_sent(connection.cluster_connection.cluster(connection.instance)))

    @asynccontextmanager
    async def _withdrawn_if_interrupted(self, *requests: str) -> AsyncIterator[None]:
        """Undo the changes of a block that is interrupted, unless they are complete."""

        async def withdraw() -> None:
            async with asyncio.timeout(WITHDRAW_S):
                await self._connection.calls.call("withdraw", requests=list(requests), by=this_program())

        try:
            yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            if not self._connection.is_closed and self._connection.cluster_connection.is_open:
                try:
                    await self._run(withdraw())
                except (ServeError, OSError) as error:
                    logger.warning("An interrupted change could not be undone, and continues: %s", error)
            raise

    async def _change(self, verb: str, *, blocking: bool = True, **message: Any) -> GoalId | None:
        """Call a verb that changes something; return when the change is complete and visible here.

        With ``blocking=False`` it returns as soon as the controller accepts the change, with the goal to wait
        for. Otherwise it raises `SupersededError` or `DeletedError` if a later change came first.
        """
        return await self._complete(await self._submit(verb, **message), blocking=blocking)

    async def _complete(self, answer: Mapping[str, Any], *, blocking: bool) -> GoalId | None:
        """Wait until an accepted change is complete; with ``blocking=False`` return its goal instead."""
        goal: GoalId | None = answer.get("goal")
        if goal is not None and not blocking:
            return goal
        if goal is not None:
            await self._wait_visibly(goal)
        else:
            await self._run(self._connection.calls.complete(answer))
        return None

    async def _wait_visibly(self, goal: GoalId) -> None:
        """Wait until a goal is reached; show the progress of a slow change on the display or in the log."""
        calls = self._connection.calls

        def wait(seconds: float) -> Coroutine[Any, Any, bool]:
            return self._run(calls.wait_until_reached(goal, seconds))

        async def describe() -> str:
            return waits_for(Status.of(await self._call("status")), goal)

        await wait_visibly(find_display(), wait, describe)
