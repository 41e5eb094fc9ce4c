"""Starting an instance on a cluster, with or without a supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.scheduler.supervisor import Supervisor
from daskserve.common.types import InstanceName, WorkerAddress
from daskserve.errors import NotRunningError

#: Timeout of the check of a scheduler that has just started.
CHECK_S = 5.0


async def start_instance(
    connection: DaskConnection, instance: InstanceName, *, timeout_s: float, **message: Any
) -> None:
    """Ask the supervisor to start an instance; install the supervisor first if needed.

    Parameters
    ----------
    timeout_s : float
        Timeout for the first worker's Host.
    **message
        The other arguments of the supervisor's verb ``start_instance``.
    """
    while True:
        await _install(connection, timeout_s)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # A call, perhaps Dask's own wait_for, swallowed a cancellation. The cancelled program may have
            # requested the end of the instance before there was a supervisor to remember it.
            raise asyncio.CancelledError
        try:
            await connection.ask("start_instance", instance=instance, timeout_s=timeout_s, **message)
            return
        except NotRunningError:
            continue  # the supervisor was unregistering after another program's last instance


async def bring_back(
    connection: DaskConnection, start: Mapping[str, Any], worker: WorkerAddress, left: Mapping[str, Any]
) -> bool:
    """Ask a new scheduler to restore an instance that outlived the previous scheduler.

    Return whether the instance is running.

    Parameters
    ----------
    start : dict
        The message that started the instance.
    worker : str
        The calling worker, which has actors of the instance.
    left : dict
        The knowledge of the instance's old controller, if it is on this worker; at least the newest epoch
        that the worker knows.
    """
    await _install(connection, CHECK_S)
    is_running: bool = await connection.ask("bring_back", start=start, worker=worker, **left)
    return is_running


async def _install(connection: DaskConnection, timeout_s: float) -> None:
    if not await connection.check_scheduler(timeout_s):
        await connection.client.register_plugin(Supervisor())
