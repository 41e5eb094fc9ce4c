"""The pending answer to one call through a handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from daskserve.cluster.protocols.base import ClusterConnection, Process
from daskserve.common.formatting import shown
from daskserve.common.types import KeptPayload, Payload
from daskserve.data.caller.blocking import refuse_in_loop, wait_in_thread
from daskserve.data.caller.calls.naming import as_read
from daskserve.data.caller.calls.pending import start_call, waiter_for
from daskserve.errors import PassedResponseError, RequestCancelledError, RequestTimeoutError
from daskserve.loops.pending_call import PendingCall
from daskserve.payload.shown_errors import shown_in_notebook


class Response:
    """The pending answer to one call. Await it, or call `result` from a thread that may block.

    Among the arguments of another call, at any depth, it is replaced by its result. That call starts once the
    result exists. A result of 4 MiB or more stays in the process of its replica until it is read, or until
    this object is dropped; other replicas get it directly from there.
    """

    # Whether a large result goes from replica to replica.
    _is_passed_on = False
    # The call that fetches a large result for this process.
    _fetching: PendingCall[Payload] | None = None

    def __init__(
        self,
        future: PendingCall[Payload | KeptPayload],
        connection: ClusterConnection,
        request_id: str,
        process: Process,
    ) -> None:
        self._future = future
        self._connection = connection
        self._process = process
        self._loaded: Any = None
        self._is_loaded = False
        self.request_id = request_id

    def __repr__(self) -> str:
        state = "cancelled" if self._future.cancelled() else "done" if self._future.done() else "pending"
        return f"<Response {self.request_id} {state}>"

    def __reduce__(self) -> NoReturn:
        raise PassedResponseError(
            f"The response to request {self.request_id} belongs to the code that made the call and cannot be "
            "pickled. Await it, or pass it to the remote() of another handle."
        )

    def __await__(self) -> Generator[Any, None, Any]:
        # Inlined for speed: every step passes through each generator in between.
        future = self._future
        if not future.done():
            future.leaves_value = self._is_passed_on
            try:
                yield from waiter_for(self._connection, future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        if not self._is_loaded:
            error = self._failure(future)
            if error is not None:
                try:
                    raise shown_in_notebook(as_read(error))
                finally:
                    del self, future, error  # as in `_check`
            payload = future.result()
            if isinstance(payload, KeptPayload):
                yield from waiter_for(self._connection, self._fetched() or future)
                return self._value()
            self._loaded = payload.load()
            self._is_loaded = True
        return self._loaded

    def _value(self) -> Any:
        # Unpickling may run user code, so it happens once and on the caller's side.
        if not self._is_loaded:
            future: PendingCall[Any] = self._fetching or self._future
            self._check(future)
            payload = future.result()
            assert not isinstance(payload, KeptPayload)
            self._loaded = payload.load()
            self._is_loaded = True
            self._future = future  # the replica's process may drop a fetched result
        return self._loaded

    def _fetched(self) -> PendingCall[Any] | None:
        """Return the call that fetches a result which stayed with its replica; None for other results."""
        future = self._future
        if self._fetching is None and future.exception() is None:
            kept = future.result()
            if type(kept) is KeptPayload:
                # Only the first fetch is kept, because several threads may read at the same time.
                vars(self).setdefault("_fetching", start_call(self._connection, self._fetch(kept)))
        return self._fetching

    async def _fetch(self, kept: KeptPayload) -> Payload:
        return await self._process.fetch_answer(kept.worker, kept.token)

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the answer; wait up to ``timeout_s`` seconds, or without limit if None.

        Raises
        ------
        RequestTimeoutError
            A `TimeoutError`: the answer took longer. The request continues.
        RequestCancelledError
            The request was cancelled.
        RuntimeError
            Called in an event loop, which it would block.
        Exception
            The error that the backend raised, with its own type.
        """
        left_s = self._wait(self._future, timeout_s)
        # Raised here already, because `_value` would add a frame to the traceback that users read.
        try:
            self._check(self._future)
        except BaseException:
            del self  # as in `_check`
            raise
        if not self._is_loaded and (fetching := self._fetched()) is not None:
            self._wait(fetching, timeout_s, left_s)
        return self._value()

    def _wait(
        self, future: PendingCall[Any], timeout_s: float | None, left_s: float | None = None
    ) -> float | None:
        """Wait for the end of a call, for at most the remaining timeout; return the rest of the timeout."""
        if left_s is None:
            left_s = timeout_s
        if future.done():
            return left_s
        refuse_in_loop(self._connection, "result()", "await the response")
        future.leaves_value = self._is_passed_on
        began = 0.0 if left_s is None else self._connection.clock.now()
        if not wait_in_thread(self._connection, future.wait, left_s, future.cancel):
            raise RequestTimeoutError(
                f"No answer to request {self.request_id} within {shown(timeout_s or 0.0)} s."
            )
        return None if left_s is None else max(0.0, left_s - (self._connection.clock.now() - began))

    def done(self) -> bool:
        """Return whether the call has ended, with an answer or an error."""
        return self._future.done()

    def cancelled(self) -> bool:
        """Return whether the call was cancelled before it ended."""
        return self._future.cancelled()

    def cancel(self) -> bool:
        """Cancel the request, and the calls made for it; return whether it was still pending.

        Cancellation is best effort. A second call has no effect.
        """
        return self._future.cancel()

    # ---- used by `Handle.map`

    def follow(self, note: Callable[[Any], object]) -> None:
        """Call ``note``, on any thread, once the call, or the fetch of its result, has ended."""
        future = self._fetching or self._future
        future.leaves_value = False
        future.add_done_callback(note)

    def fetch_rest(self) -> bool:
        """Fetch a result that stayed with its replica; return whether the fetch is still in progress."""
        fetching = self._fetched()
        return fetching is not None and not fetching.done()

    def failure(self) -> BaseException | None:
        """Return the error of a call that has ended, still packed; None if it has a result."""
        return self._failure(self._fetching or self._future)

    # ---- as an argument of another call

    def pass_on(self, connection: ClusterConnection, *, by_reference: bool) -> None:
        """Record that the result is for another replica, so that a large result stays with its replica."""
        if by_reference and connection is self._connection:
            self._is_passed_on = self._future.leaves_value = True

    def wake_when_done(self) -> asyncio.Future[None]:
        """Return a future of the running loop that completes when the call has ended."""
        return waiter_for(self._connection, self._future)

    def raise_if_failed(self) -> None:
        """Raise the error of a call that has failed or was cancelled, still packed."""
        error = self._failure(self._future)
        if error is not None:
            raise error

    def _check(self, future: PendingCall[Any]) -> None:
        """Raise the error of a call that has ended with an error, in the form for its reader."""
        error = self._failure(future)
        if error is not None:
            try:
                raise shown_in_notebook(as_read(error))
            finally:
                # Otherwise the error, its traceback and this frame reference each other, and the objects of
                # the caller's frames stay in memory until the next garbage collection.
                del self, future, error

    def _failure(self, future: PendingCall[Any]) -> BaseException | None:
        return cancelled_error(self.request_id) if future.cancelled() else future.exception()

    async def settled(self, connection: ClusterConnection, *, by_reference: bool) -> Payload | KeptPayload:
        """Return the result of a successful call, or the result's place; runs on the connection's loop."""
        found = self._future.result()
        if type(found) is not KeptPayload or (by_reference and connection is self._connection):
            return found
        fetching = self._fetched()
        assert fetching is not None
        await waiter_for(self._connection, fetching)
        fetched: Payload = fetching.result()
        return fetched


class FutureResponse(Response):
    """The pending answer to one call, which is read as a `distributed.Future` of the result.

    A large result stays with its replica until it is first read. It is then stored in the memory of that
    worker, as a value of Dask. An error of this step is raised for the reader.

    Among the arguments of another call, it is replaced by the result, as a `Response` is.
    """

    _placing: PendingCall[Any] | None = None

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            if not self._future.done():
                yield from waiter_for(self._connection, self._future)
            placing = self._placed()
            if not placing.done():
                yield from waiter_for(self._connection, placing)
        except asyncio.CancelledError:
            self._future.cancel()
            raise
        return self._read(placing)

    def result(self, timeout_s: float | None = None) -> Any:
        """Return a future of the result; otherwise like `Response.result`."""
        left_s = self._wait(self._future, timeout_s)
        placing = self._placed()
        self._wait(placing, timeout_s, left_s)
        return self._read(placing)

    def _placed(self) -> PendingCall[Any]:
        """Return the call that stores the result on the cluster."""
        self._check(self._future)
        if self._placing is None:
            placing = start_call(self._connection, self._connection.values.keep(self._future.result()))
            # only the first is kept, as for `_fetching`
            first: PendingCall[Any] = vars(self).setdefault("_placing", placing)
            return first
        return self._placing

    def _read(self, placing: PendingCall[Any]) -> Any:
        self._check(placing)
        return self._connection.values.as_read(placing.result())


def response_class(result: str) -> type[Response]:
    """Return the class of responses for a value of the option ``result``."""
    return FutureResponse if result == "future" else Response


def cancelled_error(request_id: str) -> RequestCancelledError:
    """Return the error that the reader of a cancelled call gets."""
    return RequestCancelledError(
        f"Request {request_id} was cancelled: by cancel(), or together with the request that made this call."
    )
