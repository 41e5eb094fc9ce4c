"""Fetches the responses and Dask's values among the arguments of a call.

See `daskserve.data.caller.calls.chaining` and `daskserve.cluster.dask.values`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.common.types import Payload
from daskserve.loops.event_loop import on_loop
from daskserve.payload.arguments import FilledPayload, ValueSource


async def filled(
    payload: Payload,
    keys: bytes | Mapping[str, Any],
    find_connection: Callable[[], ClusterConnection],
    instance: str,
) -> FilledPayload:
    """Return arguments that include the values that the caller sent by reference.

    Raises
    ------
    UnavailableError
        A value is lost, because the process that held it has ended.
    """
    if isinstance(keys, bytes):
        found_connection = await asyncio.to_thread(find_connection)
        return FilledPayload(payload.data, payload.buffers, await found_connection.values.fetch(keys))
    sources = keys["sources"]
    connection: ClusterConnection | None = None
    if any(kind != ValueSource.HERE for kind, *_ in sources):
        # In a child process, the first use connects to the cluster, which blocks.
        connection = await asyncio.to_thread(find_connection)
    dask = [] if connection is None or keys["dask"] is None else await connection.values.fetch(keys["dask"])
    kept = [where for kind, *where in sources if kind == ValueSource.KEPT]
    fetched = (
        []
        if connection is None or not kept
        else await on_loop(connection.loop, _fetch(connection, instance, kept))
    )
    buffers = iter(payload.buffers)
    own = tuple(islice(buffers, keys["buffers"]))
    found = {ValueSource.DASK: iter(dask), ValueSource.KEPT: iter(fetched)}
    values = [
        Payload(next(buffers), tuple(islice(buffers, where[0] - 1)))
        if kind == ValueSource.HERE
        else next(found[kind])
        for kind, *where in sources
    ]
    return FilledPayload(payload.data, own, values)


async def _fetch(
    connection: ClusterConnection, instance: str, kept: Sequence[Sequence[str]]
) -> list[Payload]:
    cluster = connection.cluster(instance)
    return await asyncio.gather(*(cluster.fetch_answer(worker, token) for worker, token in kept))
