"""Responses among the arguments of a call: ``b.remote(a.remote(x))``.

Problem: the caller does not need A's result, which may be large, and must not wait for it. Choice: the
responses are taken out of the pickled arguments, as Dask's values are. The call to B is sent once all of them
have ended, because a request that waits at B's replica would hold a slot that A may need. A result up to
`daskserve.common.types.KEPT_BYTES` arrives with A's answer, and is sent to B without being unpickled. A
larger result stays in A's process until B's process fetches it directly, or uses it in place if A and B share
a process.

Requests with unread bodies are also taken out; the call is sent once the bodies have been read.

A kept result belongs to the caller's channel: if the caller drops the response, or is lost, A's process drops
the result. If A's process ends first, the call to B fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.common.types import KeptPayload, Payload
from daskserve.common.value_places import ValuePlaces
from daskserve.data.caller.calls.arriving import ArrivingRequest
from daskserve.data.caller.calls.response import Response
from daskserve.internals.request_pickling import is_unread
from daskserve.payload.arguments import ValueSource, take_out


def chained_arguments(
    connection: ClusterConnection, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, by_reference: bool
) -> ChainedArguments:
    """Pickle arguments that hold responses, or requests that have not been read."""

    def is_taken(value: Any) -> bool:
        return isinstance(value, Response) or is_unread(value) or connection.values.is_value(value)

    payload, found = take_out((args, kwargs), is_taken)
    values = [ArrivingRequest(connection, each) if is_unread(each) else each for each in found]
    return ChainedArguments(connection, payload, values, by_reference=by_reference)


#: Types of values that must be complete before the call is sent.
_PENDING = (Response, ArrivingRequest)


class ChainedArguments:
    """The arguments of one call without their responses and unread requests.

    It is a `daskserve.cluster.protocols.base.RemoteValues`, and holds the responses, so that their results
    exist until the call is answered.
    """

    def __init__(
        self, connection: ClusterConnection, payload: Payload, values: list[Any], *, by_reference: bool
    ) -> None:
        self.payload = payload
        self.keys: Any = None
        self._connection = connection
        self._by_reference = by_reference
        self._values = values
        self._kept: list[KeptPayload] = []
        self._pending = [each for each in values if isinstance(each, _PENDING)]
        remote = [each for each in values if not isinstance(each, _PENDING)]
        self._dask = connection.values.hold(payload, remote) if remote else None
        for each in self._pending:
            if isinstance(each, Response):
                each.pass_on(connection, by_reference=by_reference)

    async def wait(self) -> None:
        """Return when all values exist; raise the error of the first call or task that failed."""
        await self._wait_for_pending()
        if self._dask is not None:
            await self._dask.wait()
        sources: list[list[Any]] = []
        buffers = list(self.payload.buffers)
        for value in self._values:
            if not isinstance(value, _PENDING):
                sources.append([ValueSource.DASK])
                continue
            found = await value.settled(self._connection, by_reference=self._by_reference)
            if isinstance(found, KeptPayload):
                self._kept.append(found)
                sources.append([ValueSource.KEPT, found.worker, found.token])
            else:
                sources.append([ValueSource.HERE, 1 + len(found.buffers)])
                buffers += [found.data, *found.buffers]
        self.keys = {
            "sources": sources,
            "buffers": len(self.payload.buffers),
            "dask": None if self._dask is None else self._dask.keys,
        }
        self.payload = Payload(self.payload.data, tuple(buffers))

    async def places(self) -> ValuePlaces | None:
        """Return the places of the values that are not sent with the call; None if there are none."""
        found = None if self._dask is None else await self._dask.places()
        nbytes, total = ({}, 0) if found is None else (dict(found.nbytes), found.total)
        for kept in self._kept:
            nbytes[kept.worker] = nbytes.get(kept.worker, 0) + kept.nbytes
            total += kept.nbytes
        return ValuePlaces(nbytes, total) if total else None

    async def _wait_for_pending(self) -> None:
        waiting = {each.wake_when_done() for each in self._pending if not each.done()}
        while True:
            for each in self._pending:
                each.raise_if_failed()
            if not waiting:
                return
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
