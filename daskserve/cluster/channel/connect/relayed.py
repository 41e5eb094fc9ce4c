"""Relays: temporary connections through the scheduler to workers that cannot be dialled directly.

While a relay is in use, the direct route is tried again with growing pauses. The first direct connection
replaces the relay. Requests in flight on the relay complete there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from daskserve.cluster.channel.wire.transport import Transport
from daskserve.common.types import WorkerAddress
from daskserve.errors import ServeError

logger = logging.getLogger("daskserve.channel")

#: First pause before the direct route is tried again. Each further pause is twice as long, up to a limit.
FIRST_PAUSE_S = 1.0


def pause_s(attempts: int, first_s: float, longest_s: float) -> float:
    """Return the pause after a number of failed attempts: it doubles, up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(attempts, 30))


class RelayedWorkers:
    """The workers that one process reaches through a relay.

    Parameters
    ----------
    connect : callable, optional
        Dials a worker directly; None means that the direct route is not tried again.
    longest_pause_s : float
        Limit of the pauses between two attempts.
    """

    def __init__(
        self, connect: Callable[[WorkerAddress], Awaitable[Transport]] | None, longest_pause_s: float
    ) -> None:
        self._connect = connect
        self._longest_pause_s = longest_pause_s
        self._tasks: dict[WorkerAddress, asyncio.Task[None] | None] = {}

    def __contains__(self, worker: WorkerAddress) -> bool:
        return worker in self._tasks

    @property
    def workers(self) -> frozenset[WorkerAddress]:
        """The workers that are reached through a relay."""
        return frozenset(self._tasks)

    def begin(self, worker: WorkerAddress, adopt: Callable[[Transport], object]) -> None:
        """Record that a worker is reached through a relay; ``adopt`` gets the first direct connection."""
        self._tasks[worker] = None
        if self._connect is not None:
            trying = self._keep_trying(self._connect, worker, adopt)
            self._tasks[worker] = asyncio.create_task(trying, name="daskserve-channel-straighten")

    def end(self, worker: WorkerAddress) -> None:
        """Forget a worker, because the relay has ended."""
        task = self._tasks.pop(worker, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _keep_trying(
        self,
        connect: Callable[[WorkerAddress], Awaitable[Transport]],
        worker: WorkerAddress,
        adopt: Callable[[Transport], object],
    ) -> None:
        attempts = 0
        while True:
            await asyncio.sleep(pause_s(attempts, FIRST_PAUSE_S, self._longest_pause_s))
            attempts += 1
            try:
                transport = await connect(worker)
            except (OSError, ValueError, ServeError) as error:
                logger.debug("Worker %s still cannot be dialled: %s", worker, error)
                continue
            self.end(worker)
            logger.info("Worker %s can be dialled again", worker)
            adopt(transport)
            return
