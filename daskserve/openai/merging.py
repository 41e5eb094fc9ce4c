"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from daskserve.common.clock import LoopClock


async def called(remote: Callable[[Any], Any], requests: Iterable[Any]) -> list[Any]:
    """Start a call for each request and return the streams; if a call fails, close the earlier ones."""
    streams: list[Any] = []
    try:
        for each in requests:
            streams.append(remote(each))
            # Let other tasks run, because each call copies its request, which may take long.
            await LoopClock().sleep(0)
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return streams


async def merged(streams: Sequence[Any]) -> AsyncIterator[tuple[int, Any]]:
    """Yield the items of several streams as they arrive, each with the number of its stream.

    At the end, or with the first error, all streams are closed.
    """
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await streams[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(maxsize=len(streams))
    ends = object()

    async def read(number: int) -> None:
        try:
            async for item in streams[number]:
                await queue.put((number, item))
            await queue.put((number, ends))
        except Exception as error:
            await queue.put((-1, error))

    tasks = [asyncio.ensure_future(read(number)) for number in range(len(streams))]
    try:
        left = len(streams)
        while left:
            number, item = await queue.get()
            if number < 0:
                raise item
            if item is ends:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
