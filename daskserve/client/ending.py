"""Ending an instance, and waiting for its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from contextlib import suppress
from typing import Any

from daskserve.cluster.base import ClientLink
from daskserve.errors import NotRunningError
from daskserve.loops.blocking import finish
from daskserve.types import InstanceName

logger = logging.getLogger("daskserve.client.client")

#: Timeout for ending an instance.
SHUTDOWN_S = 15.0
#: Interval at which a program that serves checks its connection.
CHECK_S = 1.0


async def end_instance(
    link: ClientLink, instance: InstanceName, *, asynchronous: bool, start_id: str | None = None
) -> None:
    """End an instance; do nothing if the instance or the cluster is already gone.

    With a ``start_id``, only an instance that was started under that id ends.
    """
    link.release_default(instance)
    try:
        if link.is_open:
            ending = _end(link, instance, start_id)
            await link.wait(ending) if asynchronous else link.sync(ending)
    finally:
        await link.instance_ended(instance, asynchronous=asynchronous)


def abandon_instance(link: ClientLink, instance: InstanceName) -> None:
    """End an instance whose owner is gone, from any thread."""
    if link.runs_here():
        # An owner collected by the garbage collector on the link's own loop must not block it.
        link.spawn(end_instance(link, instance, asynchronous=True))
    else:
        finish(end_instance(link, instance, asynchronous=False))


async def _end(link: ClientLink, instance: InstanceName, start_id: str | None) -> None:
    message = {} if start_id is None else {"start_id": start_id}
    if start_id is None:
        await link.drop_cluster(instance)
    try:
        async with asyncio.timeout(SHUTDOWN_S):
            has_ended = await link.ask("end_instance", instance=instance, **message)
    except NotRunningError:
        pass
    except (OSError, TimeoutError) as error:
        logger.warning("Instance %s did not end cleanly: %r", instance, error)
    else:
        if has_ended:
            await link.drop_cluster(instance)


async def wait_until_ended(link: ClientLink, instance: InstanceName, *, asynchronous: bool) -> None:
    """Wait until an instance has ended, or SIGINT or SIGTERM arrives."""
    ended = threading.Event()
    woken = asyncio.Event()
    loop = asyncio.get_running_loop() if asynchronous else None

    def end(*_: object) -> None:
        ended.set()
        if loop is not None:
            loop.call_soon_threadsafe(woken.set)

    async def listen() -> None:
        listener = link.cluster(instance).listener
        listener.on_ended(end)
        await listener.start()

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # Set the handlers even if the signals are ignored, as SIGINT is in a shell's background jobs.
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, end)
    try:
        await link.wait(listen()) if asynchronous else link.sync(listen())
        while link.is_open and not ended.is_set():
            if not asynchronous:
                ended.wait(CHECK_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await woken.wait()
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
