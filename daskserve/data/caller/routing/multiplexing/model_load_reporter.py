"""Reports to the controller that replicas are about to load models, so that all processes soon know.

Problem: the controller polls replicas every second. Until then, other processes would send requests for the
same model to other replicas, which would then also load it. Choice: a process that sends a request for a
model to a replica without it reports this, and the controller polls that replica until the model is loaded.
"""

from __future__ import annotations

import asyncio
import logging

from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import Clock
from daskserve.common.types import ReplicaTag
from daskserve.errors import ServeError

logger = logging.getLogger("daskserve.router")

#: How long replicas are collected for one call, and the timeout of that call.
GATHER_S = 0.03
TIMEOUT_S = 5.0
#: Maximum number of replicas in one call.
MAX_REPORTED = 1000


class ModelLoadReporter:
    """Reports replicas to the controller, one call at a time. It needs no retries: the controller polls."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._replicas: set[ReplicaTag] = set()
        self._task: asyncio.Task[None] | None = None

    def note(self, tag: ReplicaTag) -> None:
        """Record that a replica is about to load a model."""
        if len(self._replicas) < MAX_REPORTED:
            self._replicas.add(tag)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._report(), name="daskserve-model-load-reporter"
            )

    async def _report(self) -> None:
        try:
            while self._replicas and not self._cluster.is_ended:
                await self._clock.sleep(GATHER_S)
                tags, self._replicas = sorted(self._replicas), set()
                controller = await self._cluster.controller()
                call = self._cluster.call(controller, "note_loading", replicas=tags)
                await self._clock.wait_for(call, TIMEOUT_S)
        except (ServeError, OSError, TimeoutError) as error:
            self._cluster.forget_controller()
            logger.debug("Loading models could not be reported to the controller: %r", error)
        finally:
            self._task = None

    def close(self) -> None:
        """Send no more reports."""
        if self._task is not None:
            self._task.cancel()
