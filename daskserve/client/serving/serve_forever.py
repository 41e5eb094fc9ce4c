"""Serves until the instance or the program ends, and prints what changes.

The first SIGINT or SIGTERM lets the requests under way complete. The second one ends the program at once.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any

from daskserve.client.instance.calls import ControllerCalls, run_on
from daskserve.client.serving.changes import ChangeReports
from daskserve.cluster.protocols.base import ClientConnection
from daskserve.common.types import InstanceName
from daskserve.errors import ClusterUnreachableError

#: Interval at which a program that serves checks its connection.
CHECK_S = 1.0


class _Lines:
    """A queue of lines; None is put by signal handlers. One thread or event loop waits for them."""

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


async def serve_until_ended(
    cluster_connection: ClientConnection,
    instance: InstanceName,
    leave: Callable[[str], Awaitable[None]],
    *,
    asynchronous: bool,
) -> None:
    """Wait until an instance has ended, or SIGINT or SIGTERM arrives, then leave it; print what happens.

    Parameters
    ----------
    leave
        Ends what the program has started, given the name of the signal. A second signal interrupts it.

    Raises
    ------
    ClusterUnreachableError
        The connection was lost, and did not come back.
    """
    lines = _Lines(asyncio.get_running_loop() if asynchronous else None)
    signals = _Signals()
    try:
        with signals.handled_by(lambda: lines.put(None)):
            await _serve(cluster_connection, instance, lines, asynchronous=asynchronous)
    finally:
        with signals.handled_by(signals.interrupt):
            await leave(signals.name)


class _Signals:
    """Handles SIGINT and SIGTERM, if this is the main thread."""

    def __init__(self) -> None:
        #: The name of the first signal that has arrived.
        self.name = ""
        self._interrupt: Any = None

    @contextmanager
    def handled_by(self, handle: Callable[[], None]) -> Iterator[None]:
        """Call a function for each signal inside a ``with`` block."""

        def note(number: int, _: Any) -> None:
            self.name = self.name or signal.Signals(number).name
            handle()

        previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # Set the handlers even if the signals are ignored, as SIGINT is in a shell's background jobs.
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, note)
            self._interrupt = previous[signal.SIGINT]
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)

    def interrupt(self) -> None:
        """Interrupt the program as Ctrl-C does, which cancels the main task of `asyncio.run`."""
        if callable(self._interrupt):
            self._interrupt(signal.SIGINT, None)
        else:
            raise KeyboardInterrupt


async def _serve(
    cluster_connection: ClientConnection, instance: InstanceName, lines: _Lines, *, asynchronous: bool
) -> None:
    """Print lines until one is None; raise `ClusterUnreachableError` once the connection is closed."""
    run = partial(run_on, cluster_connection, asynchronous=asynchronous)

    async def listen() -> asyncio.Task[None]:
        listener = cluster_connection.cluster(instance).listener
        listener.on_ended(lambda: lines.put(None))
        await listener.start()
        reports = ChangeReports(ControllerCalls(cluster_connection, instance), lines.put)
        return asyncio.create_task(reports.run(), name="daskserve-changes")

    async def end(reporting: asyncio.Task[None]) -> None:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)

    reporting: asyncio.Task[None] | None = None
    try:
        reporting = await run(listen())
        was_open = True
        while not cluster_connection.is_closed:
            with suppress(queue.Empty):
                line = await lines.get(CHECK_S)
                if line is None:
                    return
                print_line(cluster_connection, line)
            if was_open and not cluster_connection.is_open:
                print_line(
                    cluster_connection,
                    f"The connection to {cluster_connection.scheduler_address} is lost; waiting for it",
                )
            was_open = cluster_connection.is_open
        raise ClusterUnreachableError(
            f"The connection to the Dask scheduler {cluster_connection.scheduler_address} was lost. "
            "Applications of other programs are not affected."
        )
    finally:
        if reporting is not None and cluster_connection.is_open:
            await run(end(reporting))


def print_line(cluster_connection: ClientConnection, line: str) -> None:
    """Print a line with the time of day."""
    text = f"{datetime.fromtimestamp(cluster_connection.clock.wall()):%H:%M:%S} {line}\n"
    # A program whose output is missing or closed keeps serving.
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.write(text)
        sys.stdout.flush()
