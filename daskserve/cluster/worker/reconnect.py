"""Keeps a worker serving while its scheduler is away, and registers it with the next one.

Problem: Dask closes a worker whose connection to the scheduler breaks, and does not let a worker register a
second time. All replicas and proxies would be lost with the scheduler, although they do not need it to answer
requests. Choice: the worker continues to serve until another scheduler answers at the address. It then
registers there, after it has forgotten the tasks that the new scheduler does not know, and asks it to bring
back the instances; the actors are still there, and their new controller adopts them.

A worker cannot register while a task still runs in one of its threads. It then completes the requests in
flight and closes, and its nanny starts a new worker. If no scheduler answers within the grace period, the
worker closes as it does without daskserve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed import Worker

from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.dask.reconnect import PERIOD_S, wait_for_scheduler
from daskserve.cluster.dask.worker_closing import WorkerOutcome, answer_close, stop_answering_close
from daskserve.cluster.distributed_internals import (
    connection_args,
    forget_tasks,
    is_present,
    pause_heartbeat,
    register_again,
    scheduler_id,
)
from daskserve.cluster.worker.retirement import COMPLETE_S
from daskserve.common.formatting import shown
from daskserve.common.types import InstanceName
from daskserve.errors import ServeError
from daskserve.loops.tasks import TaskSet
from daskserve.payload.importing import import_definition

logger = logging.getLogger("daskserve.host")

#: Import path of the function that requests an instance from the scheduler. It imports this module.
BRING_BACK = "daskserve.cluster.scheduler.install:bring_back"
#: How long a closing scheduler may still answer.
CLOSES_S = 2.0
#: How long the worker waits for Dask tasks that run in its threads; their results are lost.
TASKS_S = 1.0
#: Interval at which the worker requests an instance until it is back.
ASK_S = 0.5


class Reconnection:
    """Keeps one worker serving while its scheduler is away; see the module.

    Parameters
    ----------
    grace_s
        How long the worker serves without a scheduler; with 0, Dask closes it at once.

    Attributes
    ----------
    starts : dict
        The message that starts each instance, as the supervisor got it.
    """

    def __init__(self, worker: Worker, registry: ActorRegistry, grace_s: float) -> None:
        self.starts: dict[InstanceName, Mapping[str, Any]] = {}
        self._worker = worker
        self._registry = registry
        self._grace_s = grace_s
        self._tasks = TaskSet(logger)

    def open(self, connection: DaskConnection, complete: Callable[[], Awaitable[None]]) -> None:
        """Handle the loss of the scheduler from now on.

        ``complete`` completes the requests before the worker ends, also if the scheduler retires it.
        """
        self._connection, self._complete = connection, complete
        answer_close(self._worker, self._survive, complete)

    def close(self) -> None:
        """Let Dask handle them again; idempotent."""
        stop_answering_close(self._worker)
        self._tasks.cancel()

    async def _survive(self) -> WorkerOutcome:
        if not self.starts or self._grace_s <= 0:
            return WorkerOutcome.CLOSES
        address, lost_id = self._worker.scheduler.address, scheduler_id(self._connection.client)
        began = self._connection.clock.now()
        pause_heartbeat(self._worker)
        logger.warning(
            "The scheduler %s is lost; this worker serves without it for up to %s s",
            address,
            shown(self._grace_s),
        )
        try:
            found_id = await self._next_scheduler(address, lost_id)
        except OSError as error:
            if is_present(self._worker):
                logger.error("%s", error)
                await self._complete()
            return WorkerOutcome.CLOSES
        if found_id == lost_id or not is_present(self._worker):
            return WorkerOutcome.CLOSES  # the actors here were replaced, or the worker is closing
        left = await self._hand_over()
        if not await self._has_no_tasks():
            logger.warning("A Dask task still runs on this worker, which is replaced instead of registered")
            await asyncio.gather(*(self._ask(each, left) for each in list(self.starts)))
            await self._complete()
            return WorkerOutcome.RESTARTS
        await register_again(self._worker)
        away_s = self._connection.clock.now() - began
        logger.warning("The scheduler is back after %s s; this worker is registered again", shown(away_s))
        for instance in list(self.starts):
            self._tasks.spawn(self._bring_back(instance, left), f"back-{instance}")
        return WorkerOutcome.STAYS

    async def _has_no_tasks(self) -> bool:
        deadline = self._connection.clock.now() + TASKS_S
        while not forget_tasks(self._worker):
            if self._connection.clock.now() > deadline:
                return False
            await asyncio.sleep(PERIOD_S)
        return True

    async def _next_scheduler(self, address: str, lost_id: str | None) -> str:
        """Return the id of the next scheduler at an address, or of the lost one if it still answers there."""
        clock = self._connection.clock
        closes_until = clock.now() + CLOSES_S
        while True:
            found_id = await wait_for_scheduler(
                address,
                connection_args(self._worker),
                self._grace_s,
                clock=clock,
                is_awaited=lambda: is_present(self._worker),
            )
            if found_id != lost_id or clock.now() > closes_until:
                return found_id
            await clock.sleep(PERIOD_S)

    async def _hand_over(self) -> dict[InstanceName, Mapping[str, Any]]:
        """Return the state of the controllers here, by instance."""
        found: dict[InstanceName, Mapping[str, Any]] = {}
        for controller in self._registry.controllers():
            spec = controller.spec
            try:
                found[spec.instance] = await self._registry.call(spec.name, spec.incarnation, "hand_over", {})
            except ServeError as error:
                logger.warning("Controller %s does not report its state: %s", spec.name, error)
        return found

    async def _bring_back(self, instance: InstanceName, left: Mapping[InstanceName, Any]) -> None:
        """Ask the scheduler for an instance until it runs there; end it here if that does not happen."""
        deadline = self._connection.clock.now() + self._grace_s
        while instance in self.starts and not await self._ask(instance, left):
            if self._connection.clock.now() > deadline:
                logger.error("Instance %s did not come back. Its actors here end.", instance)
                await self._registry.drain(COMPLETE_S, instance)
                self.starts.pop(instance, None)
                return
            await asyncio.sleep(ASK_S)

    async def _ask(self, instance: InstanceName, left: Mapping[InstanceName, Any]) -> bool:
        """Ask the scheduler to bring back an instance; return whether it runs."""
        known = left.get(instance) or {"epoch": self._registry.newest_epoch(instance)}
        try:
            is_back: bool = await import_definition(BRING_BACK)(
                self._connection, self.starts[instance], self._worker.address, known
            )
        except (OSError, ServeError) as error:
            logger.info("Instance %s is not back yet: %s", instance, error)
            return False
        return is_back
