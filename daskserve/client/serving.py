"""Serves until the instance or the program ends, and prints what changes."""

from __future__ import annotations

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from daskserve.client.calls import ControllerCalls
from daskserve.client.changes import ChangeReports
from daskserve.cluster.base import ClientLink
from daskserve.types import InstanceName

T = TypeVar("T")

#: Interval at which a program that serves checks its connection.
CHECK_S = 1.0


class _Lines:
    """Lines from other threads and None from signal handlers, for one thread or event loop that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._loop = loop
        self._woken = asyncio.Event()

    def put(self, line: str | None) -> None:
        self._lines.put(line)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def get(self, timeout_s: float) -> str | None:
        """Return the next line; raise `queue.Empty` if none arrives in time."""
        if self._loop is None:
            return self._lines.get(timeout=timeout_s)
        if self._lines.empty():
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._woken.wait()
        self._woken.clear()
        return self._lines.get_nowait()


async def serve_until_ended(link: ClientLink, instance: InstanceName, *, asynchronous: bool) -> None:
    """Wait until an instance has ended, or SIGINT or SIGTERM arrives; print what changes."""
    lines = _Lines(asyncio.get_running_loop() if asynchronous else None)

    async def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return await link.wait(coroutine) if asynchronous else link.sync(coroutine)

    async def listen() -> asyncio.Task[None]:
        listener = link.cluster(instance).listener
        listener.on_ended(lambda: lines.put(None))
        await listener.start()
        reports = ChangeReports(ControllerCalls(link, instance), lines.put)
        return asyncio.create_task(reports.run(), name="daskserve-changes")

    async def end(reporting: asyncio.Task[None]) -> None:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # Set the handlers even if the signals are ignored, as SIGINT is in a shell's background jobs.
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda *_: lines.put(None))
    reporting: asyncio.Task[None] | None = None
    try:
        reporting = await run(listen())
        while link.is_open:
            with suppress(queue.Empty):
                line = await lines.get(CHECK_S)
                if line is None:
                    break
                _print(f"{datetime.fromtimestamp(link.clock.wall()):%H:%M:%S} {line}")
    finally:
        if reporting is not None and link.is_open:
            await run(end(reporting))
        for each, handler in previous.items():
            signal.signal(each, handler)


def _print(line: str) -> None:
    # A closed output must not end the serving.
    with suppress(OSError, ValueError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
