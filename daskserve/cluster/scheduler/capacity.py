"""Changes to the scheduler that protect workers which hold actors of daskserve.

To Dask, a worker that only holds actors is idle: adaptive scale-down closes it, retirement fails or loses its
actors, and the idle timeout ends the whole cluster. While instances run, this module changes three of the
scheduler's decisions. Afterwards it restores them:

- ``idle_timeout`` is suspended;
- ``adaptive_target`` is never below the workers to keep plus the workers that waiting replicas need, nor
  below one, which the controllers need;
- ``retire_workers`` (called by adaptive scale-down, ``--lifetime`` and users) first lets the controllers move
  the worker's actors.

The fourth decision, `SchedulerPlugin.valid_workers_downscaling`, is a hook and needs no change.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from distributed import Scheduler

from daskserve.cluster.dask.handlers import replace_method, restore_method
from daskserve.cluster.distributed_internals import replace_idle_timeout
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.cluster.scheduler.hosts import HOST_KEY
from daskserve.common.types import InstanceName, WorkerAddress

logger = logging.getLogger("daskserve.supervisor")

#: A cluster counts as adaptive if it requested a target within this time; an adaptive one asks about once a
#: second.
ADAPTIVE_S = 60.0

#: On a cluster without workers, how long the first instance waits for a sign that the cluster is adaptive.
REQUEST_WAIT_S = 2.5
#: Interval of the checks for the first worker.
FIRST_WORKER_POLL_S = 0.05

#: The memory of the remaining workers must hold the existing data this many times; Dask's own value.
MEMORY_RATIO = 2

Evacuate = Callable[[list[WorkerAddress]], Awaitable[None]]


class Capacity:
    """The workers that instances use and need, and the scheduler's decisions based on them.

    Parameters
    ----------
    has_instances
        Returns whether any instance runs or starts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        evacuate: Evacuate,
        stay: Callable[[Iterable[WorkerAddress]], None],
        became_adaptive: Callable[[], None],
        has_instances: Callable[[], bool],
    ) -> None:
        self._scheduler: Any = scheduler
        self._has_instances = has_instances
        self._evacuate = evacuate
        self._stay = stay
        self._became_adaptive = became_adaptive
        #: When an adaptive cluster last requested its target.
        self._requested_at = -math.inf
        self._reports: dict[InstanceName, UsageReport] = {}
        self._idle_timeout: float | None = None
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Change the scheduler's decisions; idempotent."""
        if self._originals:
            return
        scheduler = self._scheduler
        self._idle_timeout = replace_idle_timeout(scheduler, None)
        if self._idle_timeout:
            logger.info(
                "The scheduler's idle timeout of %s s is suspended while daskserve runs", self._idle_timeout
            )
        self._originals = {
            "adaptive_target": replace_method(
                scheduler, "adaptive_target", self.adaptive_target, handler=self._handle_target_request
            ),
            "retire_workers": replace_method(scheduler, "retire_workers", self.retire_workers),
        }

    def uninstall(self) -> None:
        """Restore the scheduler's decisions; idempotent."""
        scheduler = self._scheduler
        for name, original in self._originals.items():
            restore_method(scheduler, name, original)
        if self._originals:
            replace_idle_timeout(scheduler, self._idle_timeout)
        self._originals = {}

    def report(self, instance: InstanceName, report: UsageReport) -> None:
        """Store an instance's report."""
        self._reports[instance] = report

    def forget(self, instance: InstanceName) -> None:
        """Drop an instance's report."""
        self._reports.pop(instance, None)

    def in_use(self) -> set[WorkerAddress]:
        """Return the workers that hold actors of any instance."""
        return {worker for report in self._reports.values() for worker in report.in_use}

    def held(self) -> set[WorkerAddress]:
        """Return the workers that an adaptive cluster must keep for any instance."""
        return {worker for report in self._reports.values() for worker in report.held}

    @property
    def grace_s(self) -> float:
        """How long the requests on retiring workers may take, in seconds."""
        return max((report.grace_s for report in self._reports.values()), default=0.0)

    def is_free(self, leaving: set[WorkerAddress], instances: Iterable[InstanceName]) -> bool:
        """Return whether no actors are on the leaving workers, and these instances will place none there.

        Every instance must have reported since it learned of the retirement: an earlier report may lack a
        replica that was just being placed.
        """
        reports = [self._reports.get(instance, UsageReport()) for instance in instances]
        is_known = all(leaving <= report.retiring for report in reports)
        return is_known and leaving.isdisjoint(self.in_use())

    @property
    def is_adaptive(self) -> bool:
        """Whether an adaptive cluster follows `adaptive_target`."""
        return asyncio.get_running_loop().time() - self._requested_at < ADAPTIVE_S

    def _handle_target_request(self, *args: Any, **kwargs: Any) -> int:
        # Metrics and dashboards call the method directly; an adaptive cluster calls it over a connection.
        was_adaptive, self._requested_at = self.is_adaptive, asyncio.get_running_loop().time()
        if not was_adaptive:
            self._became_adaptive()
        return self.adaptive_target(*args, **kwargs)

    def workers_wanted(self) -> int:
        """Return how many more workers the waiting replicas need."""
        return sum(report.waiting_workers for report in self._reports.values())

    def adaptive_target(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of workers that Dask's tasks and replicas need together."""
        by_tasks: int = self._originals["adaptive_target"](*args, **kwargs)
        workers = self._scheduler.workers
        if by_tasks <= len(workers) and not self._has_tasks():
            # Dask requires memory for all data, including Hosts, on the workers that may leave. So it never
            # releases the last of these workers, even if workers with replicas have enough memory.
            by_tasks = min(by_tasks, len(workers) - self._unneeded())
        return max(max(by_tasks, len(self.held())) + self.workers_wanted(), int(self._has_instances()))

    async def wait_for_worker(self, timeout_s: float) -> None:
        """Return once there is a worker, or once none is expected to join any more.

        An adaptive cluster without workers starts one when it next requests its target.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self._scheduler.workers:
            limit_s = timeout_s if self.is_adaptive else min(timeout_s, REQUEST_WAIT_S)
            if loop.time() - began >= limit_s:
                return
            await asyncio.sleep(FIRST_WORKER_POLL_S)

    def _has_tasks(self) -> bool:
        scheduler = self._scheduler
        return bool(
            scheduler.queued
            or scheduler.unrunnable
            or any(worker.processing for worker in scheduler.workers.values())
        )

    def _unneeded(self) -> int:
        """Return how many workers may leave, so that the others can hold twice the data, as Dask requires."""
        workers = list(self._scheduler.workers.values())
        room = sum(worker.memory_limit or math.inf for worker in workers)
        data = sum(worker.nbytes for worker in workers)
        for plugin in list(self._scheduler.plugins.values()):
            workers = plugin.valid_workers_downscaling(self._scheduler, workers)
        count = 0
        for worker in sorted((each for each in workers if not each.long_running), key=attrgetter("nbytes")):
            room -= worker.memory_limit or 0
            if _has_data(worker) and room < MEMORY_RATIO * data:
                break
            count += 1
        return count

    async def retire_workers(
        self, workers: list[str] | None = None, *, names: list[Any] | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """Retire workers as Dask does, after their actors have moved."""
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
            # Dask raises its own error for conflicting arguments.
            return dict(await self._originals["retire_workers"](workers, names=names, **passed_on))
        if not leaving:
            return {}
        retire = self.retire  # `uninstall` may run during the evacuation
        retired: dict[str, Any] = {}
        try:
            await self._evacuate(leaving)
            retired = dict(await retire(workers=leaving, **passed_on))
        finally:
            self._stay(set(leaving) - retired.keys())
        return retired

    @property
    def retire(self) -> Callable[..., Awaitable[Any]]:
        """Dask's own ``retire_workers``, which moves data and ignores actors."""
        found: Callable[..., Awaitable[Any]] = self._originals.get(
            "retire_workers", self._scheduler.retire_workers
        )
        return found


def _has_data(worker: Any) -> bool:
    """Return whether a worker holds data other than Hosts."""
    return any(not str(task.key).startswith(HOST_KEY) for task in worker.has_what)
