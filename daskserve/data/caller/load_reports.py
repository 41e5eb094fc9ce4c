"""What the routers of a process tell the controller of the backends that are autoscaled.

One message a second for all of them, while anything waits or is in flight, and one more when that is over;
from a process with nothing to do comes nothing. A request that finds no replica at all is told at once, so
that a backend at zero starts before the second is over.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Protocol

from daskserve.clock import Clock
from daskserve.cluster.base import Cluster
from daskserve.errors import NotRunningError, ServeError
from daskserve.types import BackendTag

logger = logging.getLogger("daskserve.router")

PERIOD_S = 1.0
#: While requests wait and there is no replica, how many they are decides how many are started.
STARVING_S = 0.25
#: After a report that did not get through, because the controller is being replaced for example.
REPORT_RETRY_S = 0.1
#: Longer than a controller takes that is well.
ANSWER_S = 2.0


class BackendQueue(Protocol):
    """What is asked of the replicas of one backend, as one process sees them."""

    is_autoscaled: bool

    @property
    def waiting(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def is_starving(self) -> bool:
        """Whether requests wait and there is no replica."""


class LoadReports:
    """Reports the queues of one process and instance.

    Parameters
    ----------
    queues
        By backend; it may grow.
    """

    def __init__(self, cluster: Cluster, clock: Clock, queues: Mapping[BackendTag, BackendQueue]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._queues = queues
        self._name = uuid.uuid4().hex
        self._is_urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        #: Whether the controller may believe that there is something to do here.
        self._is_told = False

    def poke(self, *, is_urgent: bool) -> None:
        """See to it that the queues are reported, and if it is urgent at once."""
        if is_urgent:
            self._is_urgent.set()
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name="daskserve-load-reports")
            self._task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                "Reporting the load failed; the next request begins it anew", exc_info=task.exception()
            )

    def close(self) -> None:
        """Report nothing any more."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()

    def _autoscaled(self) -> dict[BackendTag, BackendQueue]:
        return {tag: each for tag, each in self._queues.items() if each.is_autoscaled}

    async def _run(self) -> None:
        while not self._cluster.is_ended and (queues := self._autoscaled()):
            pause_s = PERIOD_S
            self._is_urgent.clear()
            loads = {
                tag: [each.waiting, each.in_flight]
                for tag, each in queues.items()
                if each.waiting or each.in_flight
            }
            if (loads or self._is_told) and not await self._tell(loads):
                pause_s = REPORT_RETRY_S
            elif any(each.is_starving for each in queues.values()):
                pause_s = STARVING_S
            try:
                await self._clock.wait_for(self._is_urgent.wait(), pause_s)
            except TimeoutError:
                pass

    async def _tell(self, loads: Mapping[BackendTag, list[int]]) -> bool:
        """Return whether the controller has heard it."""
        self._is_told = True
        try:
            controller = await self._cluster.controller()
            call = self._cluster.call(controller, "report_load", router=self._name, loads=loads)
            await self._clock.wait_for(call, ANSWER_S)
        except NotRunningError:
            self._is_told = False
            return True
        except (ServeError, OSError, TimeoutError) as error:
            logger.debug("The controller could not be told of the load, trying again: %r", error)
            self._cluster.forget_controller()
            return False
        self._is_told = bool(loads)
        return True
