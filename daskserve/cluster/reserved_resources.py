"""Reserves the resources of replicas in Dask's scheduler, so that tasks go to other workers.

Problem: Dask reserves nothing for actors. Its scheduler gives as many tasks to a worker whose threads and GPU
belong to a replica as to an idle one. Choice: the scheduler counts only a part of each worker:

- its declared resources, without those of the replicas: a task that asks for more waits, or goes elsewhere;
- its threads, without those of the replicas, but at least one, which Dask's own arithmetic needs;
- a worker without a thread left is cordoned: it gets the tasks that only it may run, and all others only
  while every running worker is cordoned.

For the last point, three decisions of the scheduler are replaced while instances run. Nothing changes in the
workers, so a worker that rejoins, or another scheduler, starts with all of the worker's resources. In the
other direction, controllers are notified of the declared resources that tasks hold, and do not place replicas
on them. A replica that waits for such a resource claims it. Further tasks do not get the resource, and tasks
that wait for it at the worker move to other workers.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.types import InstanceName, WorkerAddress
from daskserve.internals.checking import needs

with needs("distributed", ">=2025.1,<2026.9") as check:
    from distributed import Scheduler, SchedulerPlugin
    from distributed.scheduler import SchedulerState, WorkerState
    from distributed.stealing import WorkStealing

    check.attributes(
        Scheduler, "add_resources", "bulk_schedule_unrunnable_after_adding_worker", "transitions"
    )
    check.attributes(Scheduler, "stimulus_queue_slots_maybe_opened")
    check.fields(
        SchedulerState, "host_info", "idle", "idle_task_count", "resources", "running", "total_nthreads"
    )
    check.fields(SchedulerState, "tasks", "total_nthreads_history", "validate", "workers")
    check.fields(SchedulerState, "extensions")
    check.fields(WorkerState, "nthreads", "processing", "resources")
    check.parameters(SchedulerState.check_idle_saturated, "self", "ws", "occ")
    check.parameters(SchedulerState.valid_workers, "self", "ts")
    check.parameters(SchedulerState.worker_objective, "self", "ts", "ws")
    check.parameters(WorkStealing.move_task_request, "self", "ts", "victim", "thief")

#: The resource that stands for the threads of a worker.
CPU = "CPU"
#: Tolerance for rounding errors of sums.
TOLERANCE = 1e-9
#: Added to the estimated start time of a task on a cordoned worker, in seconds.
CORDONED_S = 1e9
#: Interval for which changes of the resources that tasks hold are collected before an announcement, in
#: seconds.
GATHER_S = 0.1

PLUGIN_NAME = "daskserve-reserved-resources"

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Offer:
    """The resources that a worker offers to tasks.

    Attributes
    ----------
    is_cordoned : bool
        Whether replicas occupy all of its threads.
    """

    threads: int
    resources: Amounts = field(default_factory=dict)
    is_cordoned: bool = False

    def without(self, occupied: Amounts) -> Offer:
        """Return the remainder after replicas occupy these amounts."""
        left = {
            name: max(0.0, _rounded(amount - occupied[name])) if name in occupied else amount
            for name, amount in self.resources.items()
        }
        # If a worker declares a resource named CPU, replicas reserve that resource instead of threads.
        wanted = 0 if CPU in self.resources else math.floor(occupied.get(CPU, 0) + TOLERANCE)
        if not wanted:
            return Offer(self.threads, left)
        return Offer(max(1, self.threads - wanted), left, is_cordoned=wanted >= self.threads)


def _rounded(amount: float) -> float:
    whole = round(amount)
    return whole if abs(amount - whole) < TOLERANCE else amount


def _total(amounts: Iterable[Amounts]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in amounts:
        for name, amount in each.items():
            found[name] = found.get(name, 0.0) + amount
    return found


@dataclass(slots=True)
class _Changed:
    """A worker of whose resources the scheduler counts only a part."""

    worker: WorkerState
    declared: Offer
    left: Offer
    #: The worker's resources without those of its replicas, but with those that waiting replicas claim.
    unclaimed: Offer


class ReservedResources(SchedulerPlugin):
    """Reserves the resources of replicas in the scheduler, from `install` until `uninstall`.

    Parameters
    ----------
    announce
        Called with the amounts that tasks hold, for each worker where they have changed.
    """

    name = PLUGIN_NAME

    def __init__(
        self, scheduler: Scheduler, announce: Callable[[Mapping[WorkerAddress, Amounts]], None]
    ) -> None:
        self._scheduler: Any = scheduler
        self._announce = announce
        self._reports: dict[InstanceName, UsageReport] = {}
        self._changed: dict[WorkerAddress, _Changed] = {}
        #: The workers that get no tasks; empty if all of them are cordoned.
        self._cordoned: frozenset[WorkerState] = frozenset()
        self._originals: dict[str, Callable[..., Any]] = {}
        #: The amounts that tasks hold on each worker, as last announced.
        self._announced: dict[WorkerAddress, Amounts] = {}
        self._announcing: asyncio.TimerHandle | None = None

    def install(self) -> None:
        """Replace the scheduler's decisions; idempotent."""
        if self._originals:
            return
        self._scheduler.add_plugin(self)
        for method in (self.check_idle_saturated, self.valid_workers, self.worker_objective):
            self._originals[method.__name__] = getattr(self._scheduler, method.__name__)
            setattr(self._scheduler, method.__name__, method)

    def uninstall(self) -> None:
        """Release all workers to tasks, and restore the scheduler's decisions; idempotent."""
        self._reports = {}
        self._apply(list(self._changed))
        for name in self._originals:
            vars(self._scheduler).pop(name, None)
        if self._originals and PLUGIN_NAME in self._scheduler.plugins:
            self._scheduler.remove_plugin(PLUGIN_NAME)
        self._originals = {}
        if self._announcing is not None:
            self._announcing.cancel()

    def reserve(self, instance: InstanceName, report: UsageReport) -> None:
        """Set the resources that an instance's replicas occupy and claim on each worker."""
        before = self._reports.get(instance, UsageReport())
        self._reports[instance] = report
        if (before.occupied, before.claimed) != (report.occupied, report.claimed):
            self._apply([*before.occupied, *before.claimed, *report.occupied, *report.claimed])

    def forget(self, instance: InstanceName) -> None:
        """Release the resources of an instance to tasks."""
        self.reserve(instance, UsageReport())
        del self._reports[instance]

    def declared(self, worker: WorkerState) -> Offer:
        """Return all of a worker's resources, including those that replicas occupy."""
        changed = self._changed.get(worker.address)
        if changed is None or changed.worker is not worker:
            return Offer(worker.nthreads, dict(worker.resources))
        if dict(worker.resources) != changed.left.resources:
            # `Worker.set_resources` has declared different resources.
            changed.declared = Offer(changed.declared.threads, dict(worker.resources))
        return changed.declared

    def taken_by_tasks(self, worker: WorkerState) -> dict[str, float]:
        """Return the amounts of declared resources that the tasks on a worker hold."""
        if not worker.resources:
            return {}
        taken: dict[str, float] = {}
        # Not `used_resources`, which Dask does not update when a task moves to another worker.
        for task in worker.processing:
            for name, amount in (task.resource_restrictions or {}).items():
                taken[name] = taken.get(name, 0.0) + amount
        changed = self._changed.get(worker.address)
        offered = worker.resources if changed is None else changed.unclaimed.resources
        # Waiting tasks count, too, so the sum may exceed the worker's resources.
        return {name: held for name in taken if (held := min(taken[name], offered.get(name, 0.0))) > 0}

    # ---- Dask's events

    def add_worker(self, scheduler: Scheduler, worker: WorkerAddress) -> None:
        """Reserve the resources of a worker that joins; it may be rejoining."""
        self._changed.pop(worker, None)
        self._apply([worker])

    def remove_worker(self, scheduler: Scheduler, worker: WorkerAddress, **kwargs: Any) -> None:
        """Forget a worker that has left."""
        self._changed.pop(worker, None)
        self._announced.pop(worker, None)
        self._apply([])

    def log_event(self, topic: str, msg: Any) -> None:
        """Decide again which workers are cordoned, after one was paused or resumed."""
        if isinstance(msg, Mapping) and msg.get("action") == "worker-status-change":
            # Dask logs the event before it updates its state of the worker.
            asyncio.get_running_loop().call_soon(self._apply, ())

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Schedule an announcement if a task with resources starts or ends."""
        if self._announcing is None and "processing" in (start, finish):
            task = self._scheduler.tasks.get(key)
            if task is not None and task.resource_restrictions:
                loop = asyncio.get_running_loop()
                self._announcing = loop.call_later(GATHER_S, self._announce_taken)

    def _announce_taken(self) -> None:
        self._announcing = None
        changed: dict[WorkerAddress, Amounts] = {}
        for address, worker in self._scheduler.workers.items():
            taken = self.taken_by_tasks(worker)
            if taken != self._announced.get(address, {}):
                changed[address] = self._announced[address] = taken
        if changed:
            self._announce(changed)

    # ---- the scheduler's counts

    def _apply(self, workers: Sequence[WorkerAddress]) -> None:
        """Update the scheduler's counts for some workers, and decide which ones are cordoned."""
        scheduler = self._scheduler
        changed = []
        for address in dict.fromkeys(workers):
            worker = scheduler.workers.get(address)
            if worker is not None and self._count_left(worker):
                changed.append(worker)
        cordoned = {each.worker for each in self._changed.values() if each.left.is_cordoned}
        if all(worker in cordoned for worker in scheduler.running):
            cordoned = set()
        changed += [worker for worker in cordoned ^ self._cordoned if worker not in changed]
        self._cordoned = frozenset(cordoned)
        for worker in changed:
            if scheduler.workers.get(worker.address) is worker:
                self._wake(worker)
                self._move_waiting(worker)

    def _count_left(self, worker: WorkerState) -> bool:
        """Update the scheduler's counts for a worker; return whether they have changed."""
        declared, reports = self.declared(worker), self._reports.values()
        unclaimed = declared.without(_total(each.occupied.get(worker.address, {}) for each in reports))
        claimed = _total(each.claimed.get(worker.address, {}) for each in reports)
        left = Offer(unclaimed.threads, unclaimed.without(claimed).resources, unclaimed.is_cordoned)
        known = self._changed.get(worker.address)
        before = Offer(worker.nthreads, dict(worker.resources), known is not None and known.left.is_cordoned)
        if left == declared:
            self._changed.pop(worker.address, None)
        else:
            self._changed[worker.address] = _Changed(worker, declared, left, unclaimed)
        if left == before:
            return False
        self._count(worker, left)
        return True

    def _count(self, worker: WorkerState, offer: Offer) -> None:
        scheduler, more = self._scheduler, offer.threads - worker.nthreads
        if more:
            worker.nthreads = offer.threads
            scheduler.total_nthreads += more
            scheduler.total_nthreads_history.append(
                (scheduler.total_nthreads_history[-1][0], scheduler.total_nthreads)
            )
            scheduler.host_info[worker.host]["nthreads"] += more
        for name, amount in offer.resources.items():
            worker.resources[name] = amount
            scheduler.resources.setdefault(name, {})[worker.address] = amount

    def _wake(self, worker: WorkerState) -> None:
        """Make the scheduler use resources that a worker may have gained."""
        scheduler, cause = self._scheduler, "daskserve-reserved-resources"
        scheduler.check_idle_saturated(worker)
        if worker in scheduler.running:
            scheduler.transitions(scheduler.bulk_schedule_unrunnable_after_adding_worker(worker), cause)
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=cause)

    def _move_waiting(self, worker: WorkerState) -> None:
        """Move the tasks that wait on a worker for a claimed resource to workers that have it."""
        changed = self._changed.get(worker.address)
        if changed is None or changed.left == changed.unclaimed:
            return
        claimed = {
            name for name, left in changed.left.resources.items() if left < changed.unclaimed.resources[name]
        }
        counts: Counter[WorkerState] = Counter()
        for task in list(worker.processing):
            if claimed.isdisjoint(task.resource_restrictions or ()):
                continue
            others = (self._scheduler.valid_workers(task) or set()) - {worker}
            if others:
                best = min(others, key=lambda each: len(each.processing) + counts[each])
                counts[best] += 1
                # Estimated as if the other worker had no tasks. A running task is not moved.
                self._scheduler.extensions["stealing"].move_task_request(task, worker, best)

    # ---- the scheduler's decisions

    def check_idle_saturated(self, ws: WorkerState, occ: float = -1.0) -> None:
        """Record whether a worker may get tasks from the scheduler's queue, or from other workers."""
        self._originals["check_idle_saturated"](ws, occ)
        if ws in self._cordoned:
            self._scheduler.idle_task_count.discard(ws)
            if not self._scheduler.validate:  # validation requires that workers without tasks are idle
                self._scheduler.idle.pop(ws.address, None)

    def valid_workers(self, ts: Any) -> set[WorkerState] | None:
        """Return the workers that may run a task; None for all."""
        found: set[WorkerState] | None = self._originals["valid_workers"](ts)
        if found is None and self._cordoned:
            return (self._scheduler.running - self._cordoned) or None
        return found

    def worker_objective(self, ts: Any, ws: WorkerState) -> tuple[Any, ...]:
        """Return the key by which the scheduler chooses among workers, the smallest first."""
        found: tuple[Any, ...] = self._originals["worker_objective"](ts, ws)
        if ws not in self._cordoned or ts.actor:
            return found
        return (found[0] + CORDONED_S, *found[1:])
