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

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from distributed import Scheduler

from daskserve.cluster.base import UseReport
from daskserve.types import InstanceName, WorkerAddress

logger = logging.getLogger("daskserve.supervisor")

Evacuate = Callable[[list[WorkerAddress]], Awaitable[None]]


class Capacity:
    """What the instances use and want, and the scheduler's decisions in view of it."""

    def __init__(self, scheduler: Scheduler, evacuate: Evacuate) -> None:
        self._scheduler: Any = scheduler
        self._evacuate = evacuate
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
        self._originals = {name: scheduler.handlers[name] for name in ("adaptive_target", "retire_workers")}
        for name, replacement in (
            ("adaptive_target", self.adaptive_target),
            ("retire_workers", self.retire_workers),
        ):
            scheduler.handlers[name] = replacement
            setattr(scheduler, name, replacement)

    def uninstall(self) -> None:
        """Put everything back; idempotent."""
        scheduler = self._scheduler
        for name, original in self._originals.items():
            scheduler.handlers[name] = original
            scheduler.__dict__.pop(name, None)
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

    def workers_wanted(self) -> int:
        """Return how many more workers the replicas that found no room would fill."""
        cpus = sum(report.waiting_cpus for report in self._reports.values())
        if cpus <= 0:
            return 0
        workers = self._scheduler.workers.values()
        threads = sum(worker.nthreads for worker in workers) / len(workers) if workers else 1
        return max(1, math.ceil(cpus / threads))

    def adaptive_target(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of workers wanted by Dask's tasks and by replicas together."""
        by_tasks: int = self._originals["adaptive_target"](*args, **kwargs)
        return max(by_tasks, len(self.in_use())) + self.workers_wanted()

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
