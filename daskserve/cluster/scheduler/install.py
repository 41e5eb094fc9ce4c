"""Starting an instance on a cluster that may never have heard of daskserve."""

from __future__ import annotations

import asyncio
from typing import Any

from daskserve.cluster.link import Link
from daskserve.cluster.scheduler.supervisor import Supervisor
from daskserve.errors import NotRunningError
from daskserve.types import InstanceName


async def start_instance(link: Link, instance: InstanceName, *, timeout_s: float, **message: Any) -> None:
    """Have the supervisor start an instance, after installing the supervisor if need be.

    Parameters
    ----------
    timeout_s : float
        How long the first worker may take to get a Host.
    **message
        The other arguments of the supervisor's verb ``start_instance``.
    """
    while True:
        if not await link.check_scheduler(timeout_s):
            await link.client.register_plugin(Supervisor())
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # Somewhere on the way, perhaps in Dask's own wait_for, a cancellation was swallowed. Whoever gave
            # the start up may have told the scheduler so before there was anybody to remember it.
            raise asyncio.CancelledError
        try:
            await link.ask("start_instance", instance=instance, timeout_s=timeout_s, **message)
            return
        except NotRunningError:
            continue  # the supervisor was just leaving with another program's last instance
