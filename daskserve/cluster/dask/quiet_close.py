"""Closes a Dask cluster within a time limit and without tracebacks from Dask.

Problem: a worker that closes before the scheduler has answered its heartbeat interrupts the heartbeat, and
logs a traceback. Choice: all heartbeats end before the workers do.

A program that ends must not wait for a cluster that does not close. The workers end with the program in any
case; see `daskserve.cluster.dask.supervised_worker`.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from contextlib import suppress
from typing import Any

from distributed import SpecCluster, Worker

from daskserve.cluster.distributed_internals import is_calling_scheduler, pause_heartbeat, release_loop
from daskserve.loops.blocking import settled

logger = logging.getLogger("daskserve.launch")

#: How long the close waits for the last heartbeats, because a worker may hang.
LAST_S = 2.0
#: Time limit of the whole close.
CLOSE_S = 20.0
#: Interval of the checks whether a worker's last heartbeat is over.
CHECK_S = 0.005


class QuietCluster(SpecCluster):
    """A `distributed.SpecCluster` with its scheduler in this process; heartbeats end before workers."""

    def close(self, timeout: float | None = None) -> Any:
        """Close the cluster; returns an awaitable on its event loop, as Dask's own method does."""
        if self.status.name != "running":
            return super().close(timeout)
        close = super().close
        scheduler: Any = self.scheduler

        async def quietly() -> None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    # A worker that has ended or hangs is closed anyway.
                    with suppress(OSError):
                        async with asyncio.timeout(LAST_S):
                            message = {"op": "run", "function": pickle.dumps(end_heartbeats), "wait": True}
                            await scheduler.broadcast(msg=message, on_error="ignore")
                    await settled(close(timeout))
            except TimeoutError:
                logger.warning(
                    "The local cluster did not close within %s s; it ends with this program", CLOSE_S
                )

        closing = self.sync(quietly)
        if not self.asynchronous:
            release_loop(self)  # Dask's own method ran on the loop, where it cannot wait for the loop's end
        return closing


async def end_heartbeats(dask_worker: Worker) -> None:
    """Stop a worker's heartbeats, and return when none is in progress; runs in the worker."""
    pause_heartbeat(dask_worker)
    while is_calling_scheduler(dask_worker):  # noqa: ASYNC110 - Dask has no event
        await asyncio.sleep(CHECK_S)
