"""Queries the controllers for live metrics once a second, while a panel is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from daskserve.cluster.scheduler.http.panels.series import Series
from daskserve.common.clock import Clock
from daskserve.errors import ServeError
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.scheduler")

PERIOD_S = 1.0
#: Timeout of an instance's answer; an instance that does not answer in time is left out.
ANSWER_S = 0.9
#: Maximum number of instances in a panel.
MAX_INSTANCES = 20


class PanelFeed:
    """The live metrics of all instances, for the open panels.

    Parameters
    ----------
    instances : callable
        Returns the names of the instances that run.
    ask : callable
        Returns the live metrics of one.
    """

    def __init__(
        self,
        instances: Callable[[], Collection[str]],
        ask: Callable[[str], Awaitable[Mapping[str, Any]]],
        clock: Clock,
    ) -> None:
        self.series = Series()
        self._instances = instances
        self._ask = ask
        self._clock = clock
        self._watchers = 0
        self._tasks = TaskSet(logger)

    def join(self) -> None:
        """Begin a session; the first one starts the queries."""
        self._watchers += 1
        if self._watchers == 1:
            self._tasks.spawn(self._run(), "panels")

    def leave(self) -> None:
        """End a session; the last one stops the queries."""
        self._watchers -= 1
        if not self._watchers:
            self._tasks.cancel()

    def close(self) -> None:
        """Stop the queries, even if sessions are open."""
        self._tasks.cancel()

    async def _run(self) -> None:
        while True:
            due = self._clock.now() + PERIOD_S
            names = sorted(self._instances())[:MAX_INSTANCES]
            answers = await asyncio.gather(*map(self._answer_of, names))
            self.series.add(self._clock.wall(), dict(zip(names, answers, strict=True)))
            await self._clock.sleep(max(0.0, due - self._clock.now()))

    async def _answer_of(self, name: str) -> Mapping[str, Any] | None:
        try:
            return await self._clock.wait_for(self._ask(name), ANSWER_S)
        except (ServeError, OSError, TimeoutError):
            return None  # the controller is being replaced, or the instance ends
