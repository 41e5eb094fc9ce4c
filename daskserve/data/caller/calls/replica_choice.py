"""Calls to a replica that the caller has chosen first: `Handle.choose_replica` and `Handle.dispatch`.

A choice is a request like any other: it is queued, takes a slot at a replica, and counts as in flight there.
Only its arguments follow later, on the same stream. So an unused slot is free again when the block ends or
the caller is lost, and needs no other bookkeeping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.common.types import DONE, Message, Receive, Send
from daskserve.data.caller.calls.pending import start_call, waiter_for
from daskserve.data.caller.calls.response import cancelled_error
from daskserve.errors import ReplicaUnavailableError
from daskserve.loops.deadlines import until
from daskserve.loops.pending_call import PendingCall

#: Sends the request of a choice and carries it to its end.
Reserve = Callable[[Receive, Send], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class ReplicaSelection:
    """A replica with a slot that is reserved until the ``async with`` block ends.

    Attributes
    ----------
    replica_id : str
        The replica's tag.
    node_ip, port
        Where its worker listens; None if the cluster is in one process.
    node_id : str
        The address of its worker, as Dask names it.
    availability_zone : str or None
        Always None: Dask does not know zones.
    replica_metadata : dict
        Its ``backend``, the process id of its worker, and the result of ``record_replica_metadata``.
    """

    replica_id: str
    node_ip: str | None
    port: int | None
    node_id: str
    availability_zone: str | None = None
    replica_metadata: Mapping[str, Any] = field(default_factory=dict)
    #: The `ReplicaChoice` that made the selection; only in the process of the caller.
    choice: ReplicaChoice | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaSelection, tuple(self._plain().values())

    def _plain(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name != "choice"]
        return {name: getattr(self, name) for name in names}

    @property
    def address(self) -> str:
        """The address of the replica's worker: ``host:port`` if the worker listens on a port."""
        return self.node_id if self.port is None else f"{self.node_ip}:{self.port}"

    def to_dict(self) -> dict[str, Any]:
        """Return the selection as plain values."""
        return {**self._plain(), "replica_metadata": dict(self.replica_metadata), "address": self.address}

    @classmethod
    def of(cls, facts: Mapping[str, Any], choice: ReplicaChoice) -> ReplicaSelection:
        """Return the selection for a replica's answer."""
        worker = facts["worker"]
        host, _, port = worker.rpartition("://")[2].rpartition(":")
        is_network = bool(host) and port.isdigit()
        return cls(
            facts["replica_tag"],
            host if is_network else None,
            int(port) if is_network else None,
            worker,
            None,
            {"backend": facts["backend"], "pid": facts["pid"], **facts["metadata"]},
            choice,
        )


class ReplicaChoice:
    """The context manager that `Handle.choose_replica` returns."""

    def __init__(
        self, owner: tuple[str, str], connection: ClusterConnection, reserve: Reserve, *, is_stream: bool
    ) -> None:
        #: The instance and the endpoint of the handle; only this handle may dispatch to the selection.
        self.owner = owner
        self.is_stream = is_stream
        self._connection = connection
        self._reserve = reserve
        self._selected: PendingCall[ReplicaSelection] = PendingCall()
        self._holding: PendingCall[None] | None = None
        #: Completed on the connection's loop with the message that carries the arguments.
        self._message: asyncio.Future[Message] | None = None
        self._call: PendingCall[Any] | None = None
        self._put: Send | None = None
        self._answer: Any = None

    async def __aenter__(self) -> ReplicaSelection:
        self._holding = start_call(self._connection, self._hold())
        self._holding.add_done_callback(self._end)
        try:
            await waiter_for(self._connection, self._selected)
        except asyncio.CancelledError:
            self._holding.cancel()
            raise
        return self._selected.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is None and self._holding is not None:
            self._holding.cancel()

    def claim(self, call: PendingCall[Any], put: Send | None) -> None:
        """Use the slot for a call; the items of a stream go to ``put``. `send` follows.

        Raises
        ------
        RuntimeError
            The slot was used or released before.
        ReplicaUnavailableError
            The replica has stopped, or was lost.
        """
        if self._call is not None:
            raise RuntimeError("The reserved slot has been used; choose a replica again for another call.")
        holding = self._holding
        if holding is None or holding.cancelled():
            raise RuntimeError("The reserved slot was released at the end of its `async with` block.")
        if holding.done():
            raise self._lost(holding.exception())
        self._call, self._put = call, put
        call.on_cancel(holding.cancel)

    def send(self, making: Coroutine[Any, Any, Message], deadline: float | None, late: str) -> None:
        """Send the arguments to the replica once they exist; at the deadline, the call fails.

        ``late`` is the text of the error at the deadline.
        """
        carrying = self._carry(making)
        start_call(
            self._connection, self._send(carrying if deadline is None else until(deadline, carrying, late))
        )

    def _lost(self, error: BaseException | None) -> ReplicaUnavailableError:
        selected = self._selected.result()
        return ReplicaUnavailableError(
            f"Replica {selected.replica_id!r} has stopped, or was lost, since it was chosen: {error}"
        )

    # ---- on the connection's loop

    async def _send(self, carrying: Coroutine[Any, Any, None]) -> None:
        assert self._call is not None
        assert self._holding is not None
        try:
            await carrying
        except Exception as error:  # the caller gets the error
            self._call.set_error(error)
            self._holding.cancel()

    async def _carry(self, making: Coroutine[Any, Any, Message]) -> None:
        """Send the message, and wait for the end of the call."""
        assert self._holding is not None
        message = await making
        if self._message is not None and not self._message.done():
            self._message.set_result(message)
        await waiter_for(self._connection, self._holding)

    async def _hold(self) -> None:
        self._message = asyncio.get_running_loop().create_future()

        async def receive() -> Message:
            assert self._message is not None
            return await self._message

        await self._reserve(receive, self._take)

    def _take(self, message: Message) -> Awaitable[None]:
        if message["type"] == "call.reserved":
            self._selected.set_result(ReplicaSelection.of(message["replica"], self))
            return DONE
        if self._put is not None:
            return self._put(message)
        self._answer = message["payload"]
        return DONE

    def _end(self, holding: PendingCall[None]) -> None:
        """Complete the selection and the call after the request has ended."""
        error = cancelled_error("of a chosen replica") if holding.cancelled() else holding.exception()
        if not self._selected.done():
            self._selected.set_error(error or ReplicaUnavailableError("The replica made no reservation."))
        call = self._call
        if call is not None:
            if holding.cancelled():
                call.cancel()
            elif error is not None:
                call.set_error(error)
            else:
                call.set_result(self._answer)
