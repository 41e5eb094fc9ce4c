"""Moves all actors away from workers that leave, and reports when these may end.

A retired worker has as much time as it needs. A worker whose process got SIGTERM has the time that the sender
allows. The controllers move the actors; see `daskserve.control.reconcile`. This module notifies them, and
waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from distributed import Scheduler

from daskserve.cluster.long_poll import WORKERS
from daskserve.cluster.protocols.retirement import RetirementStatus
from daskserve.cluster.scheduler.capacity import Capacity
from daskserve.cluster.scheduler.controllers import ControllerSupervisor, Instance
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.common.formatting import shown
from daskserve.common.types import InstanceName, WorkerAddress

logger = logging.getLogger("daskserve.supervisor")

#: How long a retiring worker waits until its actors are replaced elsewhere, besides the time of its requests.
EVACUATION_S = 60.0
#: When a worker gets SIGTERM, the minimum share of its remaining time in which its actors are replaced
#: elsewhere. The rest is for its requests.
REPLACING_SHARE = 0.25
#: Delay before the controllers are notified, because a host that shuts down sends SIGTERM to several workers.
TOGETHER_S = 0.05
#: Maximum wait of one call of a worker that got SIGTERM, because a call occupies a connection.
ANSWER_S = 1.0


class Evacuations:
    """Moves actors away from workers that leave; see the module."""

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: HostRegistry,
        instances: Mapping[InstanceName, Instance],
        *,
        capacity: Capacity,
        controllers: ControllerSupervisor,
        publish: Callable[[InstanceName, Mapping[str, Any]], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        admit: Callable[[WorkerAddress], Coroutine[Any, Any, None]],
    ) -> None:
        self._scheduler: Any = scheduler
        self._hosts = hosts
        self._instances = instances
        self._capacity = capacity
        self._controllers = controllers
        self._publish = publish
        self._spawn = spawn
        self._admit = admit
        self._changed = asyncio.Event()
        self._is_closed = False
        #: The workers that got SIGTERM.
        self._leaving: dict[WorkerAddress, asyncio.Task[RetirementStatus]] = {}

    def wake(self) -> None:
        """Check again, after a report of a controller or the end of a worker or an instance."""
        self._changed.set()

    def forget(self, worker: WorkerAddress) -> None:
        """Forget a worker that has left the cluster."""
        self._leaving.pop(worker, None)
        self._changed.set()

    def close(self) -> None:
        """End all waits."""
        self._is_closed = True
        self._changed.set()

    async def evacuate(self, workers: list[WorkerAddress]) -> None:
        """Return once retiring workers hold no actors of daskserve, or after a time limit."""
        leaving = {worker for worker in workers if self._hosts.has(worker)}
        self._hosts.retiring.update(workers)
        for worker in workers:
            if worker not in leaving:
                await self._hosts.release(worker)  # its Host may be starting
        if not leaving:
            return
        await self._begin(leaving)
        if not await self._are_free(leaving, lambda: EVACUATION_S + self._capacity.grace_s):
            logger.warning(
                "Workers %s retire with daskserve actors that were not replaced within %s s",
                leaving,
                shown(EVACUATION_S + self._capacity.grace_s),
            )
        for worker in leaving:
            await self._hosts.release(worker)
        self._changed.set()

    def stay(self, workers: Iterable[WorkerAddress]) -> None:
        """Allow actors again on workers that Dask could not retire."""
        for worker in workers:
            if worker in self._scheduler.workers:
                self._hosts.retiring.discard(worker)
                self._spawn(self._admit(worker))

    async def leave(self, worker: WorkerAddress, within_s: float) -> str:
        """Retire a worker whose process ends within some seconds; return a `RetirementStatus`."""
        task = self._leaving.get(worker)
        if task is None:
            task = self._leaving[worker] = self._spawn(self._leave(worker, within_s))
        done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        return task.result() if done else RetirementStatus.MOVING

    async def depart(self, worker: WorkerAddress) -> None:
        """Notify all routers and controllers that a worker without actors is about to end.

        Without this, a request may reach the worker while it ends.
        """
        for instance in list(self._instances):
            self._publish(instance, {"kind": WORKERS, "joined": [], "left": [worker]})

    async def _leave(self, worker: WorkerAddress, within_s: float) -> RetirementStatus:
        if not self._hosts.has(worker):
            return RetirementStatus.STAYED
        retire = self._capacity.retire  # `uninstall` may run before it is called
        self._hosts.retiring.add(worker)
        self._changed.set()
        await asyncio.sleep(TOGETHER_S)
        if self._has_others():
            self._spawn(self._begin({worker}))

        def limit_s() -> float:
            return max(within_s - self._capacity.grace_s, within_s * REPLACING_SHARE)

        if not await self._are_free({worker}, limit_s, stays=lambda: not self._has_others()):
            # No warning if all workers end together, because this happens when the cluster closes.
            level = logging.WARNING if self._has_others() else logging.INFO
            logger.log(level, "Worker %s got SIGTERM and ends before all its actors were moved", worker)
            return RetirementStatus.STAYED
        await self._hosts.release(worker)
        # The worker's process decides when it ends, and its nanny decides whether a new one starts.
        await retire(workers=[worker], close_workers=False, remove=False)
        return RetirementStatus.MOVED

    async def _begin(self, leaving: set[WorkerAddress]) -> None:
        self._hosts.retiring |= leaving
        for entry in list(self._instances.values()):
            self._publish(
                entry.name, {"kind": WORKERS, "joined": [], "left": [], "retiring": sorted(leaving)}
            )
            if entry.controller is not None and entry.controller.worker in leaving:
                await self._controllers.replace(entry, leaving)

    def _has_others(self) -> bool:
        """Return whether other workers stay, or may join soon."""
        refused = self._hosts.refused()
        staying = self._scheduler.workers.keys() - self._hosts.retiring - refused.keys()
        return bool(staying) or self._capacity.is_adaptive

    async def _are_free(
        self,
        leaving: set[WorkerAddress],
        limit_s: Callable[[], float],
        *,
        stays: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until workers hold no actors of daskserve; return False if a time limit passes first."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s()) as limit:
                # Controllers no longer report workers that have left.
                while not self._is_closed and (here := {each for each in leaving if self._hosts.has(each)}):
                    if self._capacity.is_free(here, self._controllers.expected(here)):
                        break
                    if stays():
                        return False
                    limit.reschedule(began + limit_s())
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
