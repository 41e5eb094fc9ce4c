"""Health probes: whether a replica's user code can still run.

The replica's process still answers if the loop of user code is blocked, or if abandoned calls hold all slots.
So each replica runs probes where its user code runs, and the controller only reads the outcome. A single late
probe proves nothing, because code that computes for a while is late too. So a probe with a deadline starts
every ``period_s``, and the replica is unhealthy after several failures in a row. With the default options,
this takes at most 35 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from daskserve.common.clock import Clock, stopwatch
from daskserve.common.formatting import shown
from daskserve.common.types import short_tag
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import UnavailableError
from daskserve.payload.error_text import text_of

logger = logging.getLogger("daskserve.replica")


class HealthWatch:
    """Runs a probe at an interval, and records the outcomes.

    Parameters
    ----------
    probe : callable
        ``await probe()`` returns if user code is healthy and raises if not; it may never return.
    took : callable, optional
        Called with the seconds that each probe took.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[None]],
        clock: Clock,
        *,
        period_s: float,
        timeout_s: float,
        threshold: int,
        took: Callable[[float], None] | None = None,
    ) -> None:
        self._name = name
        self._took = took
        self._probe = probe
        self._clock = clock
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._threshold = threshold
        self._failures = 0
        #: Number of probes that have failed since the start.
        self.failures_total = 0
        self._detail = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_healthy(self) -> bool:
        """False after ``threshold`` failed probes in a row."""
        return self._failures < self._threshold

    def facts(self) -> dict[str, Any]:
        """Return the state of health in plain values."""
        return {"is_healthy": self.is_healthy, "failures": self._failures, "detail": self._detail}

    def configure(self, period_s: float, timeout_s: float, threshold: int) -> None:
        """Change the options; with another period, the next probe starts one period from now."""
        self._timeout_s, self._threshold = timeout_s, threshold
        if period_s != self._period_s:
            self._period_s = period_s
            if self._task is not None:
                # Do not wait for the task's end: `stop` may be called in the meantime, and no task may start
                # after that.
                self._task.cancel()
                self._task = None
                self.start()

    def start(self) -> None:
        """Start probing after one period; idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"daskserve-health-{self._name}")

    async def stop(self) -> None:
        """Stop probing; return when the last probe has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def check(self) -> None:
        """Probe once; raise the error of the probe, or `TimeoutError`."""
        began = stopwatch()
        try:
            await self._clock.wait_for(self._probe(), self._timeout_s)
        finally:
            if self._took is not None:
                self._took(stopwatch() - began)

    async def _run(self) -> None:
        await self._clock.sleep(self._period_s)
        while True:
            began = self._clock.now()
            try:
                await self.check()
            except TimeoutError:
                self._fail(f"the probe did not return within {shown(self._timeout_s)} s")
            except Exception as error:
                # Any error of user code or of a child process is a failed probe.
                self._fail(text_of(error))
            else:
                self._failures, self._detail = 0, ""
            await self._clock.sleep(max(0.0, began + self._period_s - self._clock.now()))

    def _fail(self, detail: str) -> None:
        self._failures += 1
        self.failures_total += 1
        self._detail = detail
        level = logging.WARNING if self._failures == self._threshold else logging.INFO
        logger.log(level, "Health probe %d of %s failed: %s", self._failures, self._name, detail)


async def probe_liveness(
    executor: UserExecutor, servable: Servable, replica_tag: str, concurrency: int
) -> None:
    """Return if user code can run in its loop and threads; otherwise raise `UnavailableError`, or hang."""
    if servable.is_plain_at_all:
        if executor.abandoned >= concurrency:
            raise UnavailableError(
                f"All {concurrency} slots of replica {short_tag(replica_tag)!r} are held by abandoned calls "
                "that still run."
            )
        await executor.run_sync(_do_nothing, threads=executor.reserved)
    if servable.is_async_at_all and not executor.is_on_worker_loop:
        await executor.run_async(_do_nothing_async)


def _do_nothing() -> None:
    pass


async def _do_nothing_async() -> None:
    pass
