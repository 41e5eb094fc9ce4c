"""A request with an unread body among the arguments of a call.

Problem: ``handle.remote(request)`` is not a coroutine, so it cannot wait for the body. Choice: the request is
taken out of the arguments, like a response, and the call is sent once the body has arrived.
"""

from __future__ import annotations

import asyncio
import copyreg
from typing import Any

from anyio.from_thread import run as run_on_loop
from starlette.requests import Request

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.common.types import Payload
from daskserve.data.caller.calls.pending import waiter_for
from daskserve.errors import PassedResponseError, RequestCancelledError
from daskserve.internals.request_pickling import read_ahead, reduce_request
from daskserve.loops.event_loop import running_loop
from daskserve.loops.pending_call import PendingCall
from daskserve.payload.importing import import_definition
from daskserve.payload.pickling import dump

#: Rebuilds a request from its pickled parts. It belongs to the replicas, which callers do not import.
REBUILD = "daskserve.data.replica.user_code.request_objects:rebuild_request"


def _rebuild(*parts: Any) -> Any:
    return import_definition(REBUILD)(*parts)


# Registered in all processes, because FastAPI applications outside of daskserve also pass requests on.
copyreg.pickle(Request, lambda request: reduce_request(request, _rebuild))


class ArrivingRequest:
    """A request whose body is being read, for another replica.

    In a thread, such as that of a plain function of a FastAPI application, the constructor blocks until the
    body is read.
    """

    def __init__(self, connection: ClusterConnection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._future: PendingCall[Payload] = PendingCall()
        if running_loop() is None:
            _read_in_thread(request)
            self._future.set_result(dump(request))
        else:
            # The loop keeps the task alive until it has ended, and the callback keeps this object alive.
            read_ahead(request).add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._future.set_error(
                RequestCancelledError("The request was cancelled before its body had arrived.")
            )
            return
        try:
            task.result()
            self._future.set_result(dump(self._request))
        except (
            Exception
        ) as error:  # the client left, or a form's file is closed: the call's reader gets this error
            self._future.set_error(error)

    def done(self) -> bool:
        """Return whether the body has been read, or reading it has failed."""
        return self._future.done()

    def wake_when_done(self) -> asyncio.Future[None]:
        """Return a future of the running loop that completes when the body is read, or reading it fails."""
        return waiter_for(self._connection, self._future)

    def raise_if_failed(self) -> None:
        """Raise the error of reading the body, if there is one."""
        error = self._future.exception()
        if error is not None:
            raise error

    async def settled(self, connection: ClusterConnection, *, by_reference: bool) -> Payload:
        """Return the request with its body; see `daskserve.data.caller.calls.response.Response.settled`."""
        return self._future.result()


def _read_in_thread(request: Request) -> None:
    try:
        run_on_loop(request.body)
    except RuntimeError as error:
        raise PassedResponseError(
            "The body of the request has not been read, and this thread cannot wait for it. Await "
            "request.body() on the event loop of the request first."
        ) from error
