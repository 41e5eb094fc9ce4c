"""Starting an instance on a cluster, with or without a supervisor."""

from __future__ import annotations

import asyncio
from typing import Any

from daskserve.cluster.link import DaskLink
from daskserve.cluster.scheduler.supervisor import Supervisor
from daskserve.errors import NotRunningError
from daskserve.types import InstanceName


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
        if not await link.check_scheduler(timeout_s):
            await link.client.register_plugin(Supervisor())
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
