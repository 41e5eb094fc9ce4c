"""Retires a worker when its process gets SIGTERM, before the process ends.

Problem: systemd, Kubernetes and job schedulers send SIGTERM to a nanny, to its worker's process, or to both.
Dask then ends the processes at once, and all requests in flight fail. Choice: SIGTERM starts the same
retirement as ``client.retire_workers``, and ends the process afterwards; see `daskserve.loops.termination`. A
nanny that gets SIGTERM first retires its worker; see `daskserve.cluster.worker.nannies`.

Actors that the scheduler cannot move in time, because there is no other worker or no scheduler, complete
their requests here. The process ends before the sender's time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from distributed import Worker

from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.dask.cluster import ask_from_worker
from daskserve.cluster.protocols.retirement import RetirementStatus
from daskserve.cluster.worker.nannies import watch_nanny
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.errors import ServeError
from daskserve.loops.tasks import TaskSet
from daskserve.loops.termination import begin_on, on_sigterm

logger = logging.getLogger("daskserve.host")

#: The time that Dask needs to end the process afterwards, or less if the whole time is short.
EXIT_S = 2.0
EXIT_SHARE = 0.2
#: How long to wait at most until all routers know that this worker has no replicas.
NEWS_S = 1.0
#: Time limit for the requests of a worker that ends without SIGTERM.
COMPLETE_S = 20.0
#: Timeout of the scheduler's answer, which normally takes a second at most.
ANSWER_S = 4.0


class Retirement:
    """Retires this worker on SIGTERM; see the module.

    Parameters
    ----------
    grace_s
        How long the sender of SIGTERM waits before it kills.
    """

    def __init__(self, worker: Worker, registry: ActorRegistry, clock: Clock, grace_s: float) -> None:
        self._worker = worker
        self._registry = registry
        self._clock = clock
        self._grace_s = grace_s
        self._tasks = TaskSet(logger)
        self._retiring: asyncio.Task[None] | None = None
        self._stop_answering: Callable[[], None] | None = None

    async def open(self, *, has_process: bool) -> None:
        """Retire from now on when SIGTERM arrives here or at the nanny; idempotent.

        Parameters
        ----------
        has_process
            Whether the process is the worker's own, so that its signals are meant for the worker.
        """
        if self._grace_s <= 0 or not has_process or self._stop_answering is not None:
            return
        self._stop_answering = on_sigterm(begin_on(asyncio.get_running_loop(), self.begin))
        await watch_nanny(self._worker, self._grace_s)

    def close(self) -> None:
        """Leave SIGTERM to Dask again, unless it has arrived; idempotent."""
        if self._stop_answering is not None:
            self._stop_answering()
            self._stop_answering = None

    def begin(self) -> asyncio.Task[None]:
        """Begin to retire; return the task, which is done when the process may end. Idempotent."""
        if self._retiring is None:
            self._retiring = self._tasks.spawn(self._retire(), "retire")
        return self._retiring

    async def _retire(self) -> None:
        ends_at = self._clock.now() + self._grace_s - min(EXIT_S, self._grace_s * EXIT_SHARE)
        logger.info("SIGTERM: this worker retires and ends, within %s s", shown(self._grace_s))
        if not await self._move(ends_at):
            await self._complete(ends_at - NEWS_S - self._clock.now())

    async def complete(self) -> None:
        """Complete the requests of a worker that ends now, if it has actors.

        The scheduler is gone, or has removed the worker. Normally it moves the actors before, but a scheduler
        that has just started does not know them.
        """
        if self._registry.entries:
            logger.warning("This worker ends; its requests complete within %s s", shown(COMPLETE_S))
            await self._complete(COMPLETE_S)

    async def _complete(self, limit_s: float) -> None:
        await self._registry.drain(max(0.0, limit_s))
        await self._depart()

    async def _depart(self) -> None:
        """Refuse requests until all routers know that this worker ends; they send refused requests to other
        workers."""
        try:
            async with asyncio.timeout(NEWS_S):
                await ask_from_worker(self._worker, "depart", worker=self._worker.address)
        except (OSError, TimeoutError, ServeError) as error:
            # Routers notice when this worker refuses their first request.
            logger.warning("The scheduler cannot announce that this worker has ended: %r", error)
        await self._clock.sleep(NEWS_S / 2)

    async def _move(self, ends_at: float) -> bool:
        """Make the scheduler move all actors to other workers; return whether it did."""
        while (left_s := ends_at - self._clock.now()) > 0:
            try:
                async with asyncio.timeout(min(ANSWER_S, left_s)):
                    answer = await ask_from_worker(
                        self._worker, "leave", worker=self._worker.address, within_s=left_s
                    )
            except (OSError, TimeoutError, ServeError) as error:
                logger.warning("The scheduler does not move the actors of this worker: %r", error)
                return False
            if answer != RetirementStatus.MOVING:
                return bool(answer == RetirementStatus.MOVED)
        return False
