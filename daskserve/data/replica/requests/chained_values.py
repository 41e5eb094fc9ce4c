"""The replica's side of responses and Dask's values among the arguments of a call.

See `daskserve.data.caller.calls.chaining` and `daskserve.cluster.dask.values`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from daskserve.cluster.protocols.base import Link
from daskserve.common.types import Payload
from daskserve.loops.event_loop import on_loop
from daskserve.payload.arguments import FilledPayload, ValueSource


async def filled(
    payload: Payload, keys: bytes | Mapping[str, Any], find_link: Callable[[], Link], instance: str
) -> FilledPayload:
    """Return arguments with the values that their caller took out, fetched from where they are.

    Raises
    ------
    UnavailableError
        A value is lost: the process that held it has ended.
    """
    if isinstance(keys, bytes):
        found_link = await asyncio.to_thread(find_link)
        return FilledPayload(payload.data, payload.buffers, await found_link.values.fetch(keys))
    sources = keys["sources"]
    link: Link | None = None
    if any(kind != ValueSource.HERE for kind, *_ in sources):
        # In a child process, the first use of the link connects to the cluster, and blocks.
        link = await asyncio.to_thread(find_link)
    dask = [] if link is None or keys["dask"] is None else await link.values.fetch(keys["dask"])
    kept = [where for kind, *where in sources if kind == ValueSource.KEPT]
    fetched = [] if link is None or not kept else await on_loop(link.loop, _fetch(link, instance, kept))
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


async def _fetch(link: Link, instance: str, kept: Sequence[Sequence[str]]) -> list[Payload]:
    cluster = link.cluster(instance)
    return await asyncio.gather(*(cluster.fetch_answer(worker, token) for worker, token in kept))
