"""Ending an instance, and waiting for its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from typing import Any

from daskserve.cluster.base import ClientLink
from daskserve.errors import NotRunningError
from daskserve.types import InstanceName

logger = logging.getLogger("daskserve.client.client")

#: Timeout for ending an instance.
SHUTDOWN_S = 15.0


def end_instance(link: ClientLink, instance: InstanceName, *, start_id: str | None = None) -> None:
    """End an instance from any thread; do nothing if the instance or the cluster is already gone.

    With a ``start_id``, only an instance that was started under that id ends.
    """
    message = {} if start_id is None else {"start_id": start_id}

    async def end() -> None:
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

    link.release_default(instance)
    if link.runs_here():
        # A client collected by the garbage collector on the link's own loop must not block it.
        link.spawn(end())
        return
    try:
        if link.is_open:
            link.sync(end())
    finally:
        link.instance_ended(instance)


def wait_until_ended(link: ClientLink, instance: InstanceName) -> None:
    """Block this thread until an instance has ended, or SIGINT or SIGTERM arrives."""
    ended = threading.Event()

    async def listen() -> None:
        listener = link.cluster(instance).listener
        listener.on_ended(ended.set)
        await listener.start()

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # Set the handlers even if the signals are ignored, as SIGINT is in a shell's background jobs.
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda *_: ended.set())
    try:
        link.sync(listen())
        while link.is_open and not ended.wait(1.0):
            pass
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
