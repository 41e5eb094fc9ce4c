"""Calls to every running replica of a deployment: `Handle.broadcast`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from daskserve.cluster.protocols.base import Cluster, ClusterConnection
from daskserve.common.formatting import shown
from daskserve.common.types import DONE, ActorAddress, Envelope, Message, Payload, nothing_to_receive
from daskserve.data.caller.blocking import refuse_in_loop
from daskserve.data.caller.calls.pending import waiter_for
from daskserve.data.caller.calls.response import cancelled_error
from daskserve.errors import RequestTimeoutError
from daskserve.loops.pending_call import PendingCall
from daskserve.payload.packed_errors import unpacked
from daskserve.payload.shown_errors import shown_in_notebook

#: The answer of one replica.
ReplicaOutcome = Payload | Exception


class BroadcastResponse:
    """The pending answers of all replicas to one broadcast, in the order of the replicas' tags."""

    def __init__(
        self, future: PendingCall[Sequence[ReplicaOutcome]], connection: ClusterConnection, request_id: str
    ) -> None:
        self._future = future
        self._connection = connection
        self.request_id = request_id

    def __repr__(self) -> str:
        return f"<BroadcastResponse {self.request_id} {'done' if self._future.done() else 'pending'}>"

    def results(self, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
        """Return the result of each replica; wait up to ``timeout_s`` seconds, or without limit if None.

        Parameters
        ----------
        return_exceptions : bool
            Whether errors are returned among the results; otherwise the first one is raised.

        Raises
        ------
        RequestTimeoutError
            A `TimeoutError`: a replica has not answered in time. The calls continue.
        RuntimeError
            Called in an event loop, which it would block.
        """
        if not self._future.done():
            refuse_in_loop(self._connection, "results()", "await results_async()")
            if not self._future.wait(timeout_s):
                raise self._timeout(timeout_s)
        return self._values(return_exceptions)

    async def results_async(
        self, timeout_s: float | None = None, return_exceptions: bool = False
    ) -> list[Any]:
        """Return the result of each replica; the same as `results`, for event loops."""
        try:
            async with asyncio.timeout(timeout_s):
                await waiter_for(self._connection, self._future)
        except TimeoutError:
            raise self._timeout(timeout_s) from None
        return self._values(return_exceptions)

    def cancel(self) -> bool:
        """Cancel the calls that have not ended; return whether there were any."""
        return self._future.cancel()

    def _timeout(self, timeout_s: float | None) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"Not all replicas have answered request {self.request_id} within {shown(timeout_s or 0.0)} s."
        )

    def _values(self, return_exceptions: bool) -> list[Any]:
        if self._future.cancelled():
            raise cancelled_error(self.request_id)
        outcomes = [unpacked(each) if isinstance(each, Exception) else each for each in self._future.result()]
        if not return_exceptions:
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise shown_in_notebook(outcome)
        return [each if isinstance(each, BaseException) else each.load() for each in outcomes]


async def send_to_all(
    cluster: Cluster, replicas: Sequence[ActorAddress], envelope: Envelope
) -> list[ReplicaOutcome]:
    """Send a call to replicas, regardless of queues, and return the outcome of each."""
    return list(await asyncio.gather(*(_send(cluster, replica, envelope) for replica in replicas)))


async def _send(cluster: Cluster, replica: ActorAddress, envelope: Envelope) -> ReplicaOutcome:
    answers: list[Payload] = []

    def keep(message: Message) -> Awaitable[None]:
        answers.append(message["payload"])
        return DONE

    try:
        await cluster.request(replica, envelope).respond(nothing_to_receive, keep)
    except Exception as error:  # the error is the outcome of this replica
        return error
    return answers[0]
