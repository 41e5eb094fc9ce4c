"""What the scheduler must know about workers that hold actors of ours.

Dask takes a worker that only holds actors for idle: adaptive scale-down closes it, retiring it fails or
loses what it holds, and the idle timeout ends the whole cluster. While instances run, this changes three of
the scheduler's decisions, and puts everything back afterwards:

- ``idle_timeout`` is suspended;
- ``adaptive_target`` is never below the workers in use, plus what waiting replicas need;
- ``retire_workers`` (which adaptive scale-down, ``--lifetime`` and users all come through) first lets the
  controllers move what the worker holds.

`SchedulerPlugin.valid_workers_downscaling`, the fourth, is a hook and needs no change.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from distributed import Scheduler

from daskserve.cluster.base import UseReport
from daskserve.cluster.distributed_internals import replace_method, restore_method
from daskserve.cluster.scheduler.hosts import HOST_KEY
from daskserve.types import InstanceName, WorkerAddress

logger = logging.getLogger("daskserve.supervisor")

#: What scales a cluster asks every second or so; one that has not asked for so long does not any more.
ADAPTIVE_S = 60.0

Evacuate = Callable[[list[WorkerAddress]], Awaitable[None]]


class Capacity:
    """What the instances use and want, and the scheduler's decisions in view of it."""

    def __init__(self, scheduler: Scheduler, evacuate: Evacuate, became_adaptive: Callable[[], None]) -> None:
        self._scheduler: Any = scheduler
        self._evacuate = evacuate
        self._became_adaptive = became_adaptive
        #: When a cluster that scales itself asked last how many workers it should have.
        self._asked_at = -math.inf
        self._reports: dict[InstanceName, UseReport] = {}
        self._idle_timeout: float | None = None
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Change the scheduler's decisions; idempotent."""
        if self._originals:
            return
        scheduler = self._scheduler
        self._idle_timeout, scheduler.idle_timeout = scheduler.idle_timeout, None
        if self._idle_timeout:
            logger.info(
                "The scheduler's idle timeout of %s s is suspended while daskserve runs", self._idle_timeout
            )
        self._originals = {
            "adaptive_target": replace_method(
                scheduler, "adaptive_target", self.adaptive_target, handler=self._asked
            ),
            "retire_workers": replace_method(scheduler, "retire_workers", self.retire_workers),
        }

    def uninstall(self) -> None:
        """Put everything back; idempotent."""
        scheduler = self._scheduler
        for name, original in self._originals.items():
            restore_method(scheduler, name, original)
        if self._originals:
            scheduler.idle_timeout = self._idle_timeout
        self._originals = {}

    def report(self, instance: InstanceName, report: UseReport) -> None:
        """Take note of what an instance uses."""
        self._reports[instance] = report

    def forget(self, instance: InstanceName) -> None:
        """Drop what an instance reported."""
        self._reports.pop(instance, None)

    def in_use(self) -> set[WorkerAddress]:
        """Return the workers that hold actors of any instance."""
        return {worker for report in self._reports.values() for worker in report.in_use}

    def is_free(self, leaving: set[WorkerAddress], instances: Iterable[InstanceName]) -> bool:
        """Whether nothing of ours is on workers that leave, and these instances will put nothing there.

        For that each must have said that it knows: a report from before may be older than a replica that
        was just being placed.
        """
        reports = [self._reports.get(instance, UseReport()) for instance in instances]
        is_known = all(leaving <= report.retiring for report in reports)
        return is_known and leaving.isdisjoint(self.in_use())

    @property
    def is_adaptive(self) -> bool:
        """Whether something scales the cluster by what `adaptive_target` says."""
        return asyncio.get_running_loop().time() - self._asked_at < ADAPTIVE_S

    def _asked(self, *args: Any, **kwargs: Any) -> int:
        # Metrics and dashboards call the method; what is going to scale asks over a connection.
        was_adaptive, self._asked_at = self.is_adaptive, asyncio.get_running_loop().time()
        if not was_adaptive:
            self._became_adaptive()
        return self.adaptive_target(*args, **kwargs)

    def workers_wanted(self) -> int:
        """Return how many more workers the replicas that found no room would fill."""
        return sum(report.waiting_workers for report in self._reports.values())

    def adaptive_target(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of workers wanted by Dask's tasks and by replicas together."""
        by_tasks: int = self._originals["adaptive_target"](*args, **kwargs)
        workers = self._scheduler.workers
        if by_tasks <= len(workers) and not self._has_tasks():
            # Dask takes our Hosts for data that must find room on those workers that may leave, and so never
            # lets the last of these go.
            by_tasks = min(by_tasks, len(workers) - len(self._empty()))
        return max(by_tasks, len(self.in_use())) + self.workers_wanted()

    def _has_tasks(self) -> bool:
        scheduler = self._scheduler
        return bool(
            scheduler.queued
            or scheduler.unrunnable
            or any(worker.processing for worker in scheduler.workers.values())
        )

    def _empty(self) -> list[Any]:
        """Return the workers that may leave and hold nothing but a Host."""
        workers = list(self._scheduler.workers.values())
        for plugin in list(self._scheduler.plugins.values()):
            workers = plugin.valid_workers_downscaling(self._scheduler, workers)
        return [
            worker
            for worker in workers
            if not worker.long_running and all(str(task.key).startswith(HOST_KEY) for task in worker.has_what)
        ]

    async def retire_workers(
        self, workers: list[str] | None = None, *, names: list[Any] | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """Retire workers as Dask does, after what they hold of ours has moved."""
        kept = ("close_workers", "remove", "stimulus_id")
        passed_on = {name: options.pop(name) for name in kept if name in options}
        known = self._scheduler.workers
        if names is not None and workers is None:
            wanted = {str(name) for name in names}
            leaving = [address for address, worker in known.items() if str(worker.name) in wanted]
        elif workers is not None and names is None:
            leaving = [address for address in workers if address in known]
        elif workers is None:
            leaving = list(self._scheduler.workers_to_close(**options))
        else:
            # Dask's own error for arguments that exclude each other.
            return dict(await self._originals["retire_workers"](workers, names=names, **passed_on))
        if not leaving:
            return {}
        retire = self._originals["retire_workers"]  # before the last instance, and this, may go
        await self._evacuate(leaving)
        return dict(await retire(workers=leaving, **passed_on))
