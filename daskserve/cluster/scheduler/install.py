"""Starting an instance on a cluster, with or without a supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from daskserve.cluster.dask.connection import DaskLink
from daskserve.cluster.scheduler.supervisor import Supervisor
from daskserve.common.types import InstanceName, WorkerAddress
from daskserve.errors import NotRunningError

#: Timeout of the check of a scheduler that has just started.
CHECK_S = 5.0


async def start_instance(link: DaskLink, instance: InstanceName, *, timeout_s: float, **message: Any) -> None:
    """Ask the supervisor to start an instance; install the supervisor first if needed.

    Parameters
    ----------
    timeout_s : float
        Timeout for the first worker's Host.
    **message
        The other arguments of the supervisor's verb ``start_instance``.
    """
    while True:
        await _install(link, timeout_s)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # A call, perhaps Dask's own wait_for, swallowed a cancellation. The cancelled program may have
            # asked the scheduler to end the instance before there was a supervisor to remember it.
            raise asyncio.CancelledError
        try:
            await link.ask("start_instance", instance=instance, timeout_s=timeout_s, **message)
            return
        except NotRunningError:
            continue  # the supervisor was unregistering after another program's last instance


async def bring_back(
    link: DaskLink, start: Mapping[str, Any], worker: WorkerAddress, left: Mapping[str, Any]
) -> bool:
    """Ask a scheduler to bring back an instance that has outlived another one; return whether it runs.

    Parameters
    ----------
    start : dict
        The message that started the instance.
    worker : str
        The worker that asks, which has actors of the instance.
    left : dict
        What the instance's controller of that time knows, if it is on this worker; at least the newest epoch
        that is known there.
    """
    await _install(link, CHECK_S)
    is_running: bool = await link.ask("bring_back", start=start, worker=worker, **left)
    return is_running


async def _install(link: DaskLink, timeout_s: float) -> None:
    if not await link.check_scheduler(timeout_s):
        await link.client.register_plugin(Supervisor())
