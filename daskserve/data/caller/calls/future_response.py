"""Responses whose results stay on the cluster: ``handle.options(result="future")``.

Choice: a large result stays with its replica as any other one that nobody reads, until the first reader of
the response has it put into the memory of that worker, as a value of Dask. An error is thus raised to that
reader, and a future exists only for what has succeeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.naming import as_read
from daskserve.data.caller.calls.pending import start_call, waiter_for
from daskserve.data.caller.calls.response import Response
from daskserve.loops.pending_call import PendingCall
from daskserve.payload.shown_errors import shown_in_notebook


class FutureResponse(Response):
    """The pending answer to one call, which is read as a `distributed.Future` of the result.

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
        self._wait(self._future, timeout_s)
        placing = self._placed()
        self._wait(placing, timeout_s)
        return self._read(placing)

    def _placed(self) -> PendingCall[Any]:
        """Return the call that puts the result of a call that has ended onto the cluster."""
        self._check(self._future)
        if self._placing is None:
            self._placing = start_call(self._connection, self._connection.values.keep(self._future.result()))
        return self._placing

    def _read(self, placing: PendingCall[Any]) -> Any:
        self._check(placing)
        return self._connection.values.as_read(placing.result())

    def _check(self, call: PendingCall[Any]) -> None:
        error = self._failure(call)
        if error is not None:
            raise shown_in_notebook(as_read(error))


def response_class(options: CallOptions) -> type[Response]:
    """Return the class of the responses to calls with some options."""
    return FutureResponse if options.result == "future" else Response
