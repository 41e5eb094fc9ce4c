"""Removes the topics of ended instances, which the scheduler would keep until it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed import Scheduler

from daskserve.cluster.dask.cluster import topic_of
from daskserve.cluster.distributed_internals import drop_topic, has_listeners, is_running, topics_of
from daskserve.common.types import InstanceName

#: Pause before the next sweep while topics of ended instances are found.
SWEEP_S = 1.0


class EndedTopics:
    """Removes the topics of instances that do not run.

    A topic stays while it has listeners, because an unsubscription creates a removed topic again. Messages in
    flight create it again, too, so a sweep that finds a topic is repeated.

    Parameters
    ----------
    runs : callable
        Returns whether an instance of this name runs.
    """

    def __init__(self, scheduler: Scheduler, runs: Callable[[InstanceName], bool]) -> None:
        self._scheduler = scheduler
        self._runs = runs
        self._next: asyncio.TimerHandle | None = None

    def sweep(self) -> None:
        """Remove topics now, and again until a sweep finds none."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        prefix = topic_of("")
        ended = [
            topic
            for topic in topics_of(self._scheduler)
            if topic.startswith(prefix) and not self._runs(topic.removeprefix(prefix))
        ]
        for topic in ended:
            if not has_listeners(self._scheduler, topic):
                drop_topic(self._scheduler, topic)
        if ended and is_running(self._scheduler):
            self._next = asyncio.get_running_loop().call_later(SWEEP_S, self.sweep)
