"""The routes from one process to the workers, for one instance.

Problem: two workers may reach the scheduler but not each other, and an unanswered dial takes seconds.
Requests must not wait for a dial if another replica can take them. Choice: a worker whose connection was
lost, or that did not answer the first dial at once, is set aside. A background task dials it again, with
growing pauses. Routers are notified when that succeeds, and whether the route leads through the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from daskserve.cluster.channel.connect.relayed import pause_s
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.common.clock import Clock
from daskserve.common.types import Reachability, WorkerAddress
from daskserve.errors import ServeError

logger = logging.getLogger("daskserve.channel")

#: How long a request waits for the first connection to a worker before it goes to another one.
PATIENCE_S = 0.25
#: The first pause before a lost worker is dialled again: time for the scheduler to report its end. Each
#: further pause is twice as long, up to the limit.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

#: Gets a worker and its new route.
NoteRoute = Callable[[WorkerAddress, Reachability], object]


class WorkerRoutes:
    """The routes from one process to the workers; see the module."""

    def __init__(self, channels: ChannelPool, clock: Clock) -> None:
        self._channels = channels
        self._clock = clock
        self._watchers: list[tuple[NoteRoute, Callable[[WorkerAddress], bool]]] = []
        #: The workers that are set aside, each with the task that dials it again.
        self._aside: dict[WorkerAddress, asyncio.Task[None]] = {}
        channels.watchers.append(self._note)

    def __repr__(self) -> str:
        return f"<WorkerRoutes {self.broken()}>"

    def watch(self, note: NoteRoute, is_used: Callable[[WorkerAddress], bool]) -> None:
        """Report changes of routes; a lost worker is dialled again as long as it is used."""
        self._watchers.append((note, is_used))

    def to(self, worker: WorkerAddress) -> Reachability | None:
        """Return the route to a worker; None if it is not known yet."""
        return Reachability.NONE if worker in self._aside else self._channels.route_to(worker)

    async def connect(self, worker: WorkerAddress) -> None:
        """Connect to a worker, if necessary.

        Raises
        ------
        ActorLostError
            The worker cannot be reached, or not at once.
        """
        await self._channels.connect(worker, PATIENCE_S)

    def break_off(self, worker: WorkerAddress) -> None:
        """Fail the requests in flight at a worker, because it does not answer."""
        self._channels.break_off(worker)

    def broken(self) -> dict[WorkerAddress, Reachability]:
        """Return the workers that are not reached directly, each with its route."""
        relayed = dict.fromkeys(self._channels.relayed, Reachability.SCHEDULER)
        return {**relayed, **dict.fromkeys(self._aside, Reachability.NONE)}

    def close(self) -> None:
        """Stop dialling and reporting changes. Idempotent."""
        if self._note in self._channels.watchers:
            self._channels.watchers.remove(self._note)
        self._watchers.clear()
        for worker in list(self._aside):
            self._take_back(worker)

    def _is_used(self, worker: WorkerAddress) -> bool:
        return any(is_used(worker) for _, is_used in self._watchers)

    def _note(self, worker: WorkerAddress, route: Reachability) -> None:
        if route is not Reachability.NONE:
            self._take_back(worker)
        elif worker not in self._aside and self._is_used(worker):
            self._aside[worker] = asyncio.create_task(self._dial_again(worker), name="daskserve-dial-again")
        for note, _ in list(self._watchers):
            note(worker, route)

    def _take_back(self, worker: WorkerAddress) -> None:
        task = self._aside.pop(worker, None)
        if task is not None:
            task.cancel()

    async def _dial_again(self, worker: WorkerAddress) -> None:
        attempts = 0
        while self._is_used(worker):
            await self._clock.sleep(pause_s(attempts, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            attempts += 1
            try:
                await self._channels.connect(worker)
            except (ServeError, OSError) as error:
                logger.debug("Worker %s still cannot be reached: %s", worker, error)
            else:
                break
        self._aside.pop(worker, None)
