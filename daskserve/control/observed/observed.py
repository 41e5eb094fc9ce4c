"""The observations of the cluster. Each stays until it is no longer true.

Observations are not stored: a new controller queries the cluster again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from daskserve.autoscaling.context import Sample
from daskserve.cluster.protocols.base import LAST_LINES
from daskserve.common.copying import replace
from daskserve.common.types import (
    BackendTag,
    GoalId,
    RankInfo,
    ReplicaState,
    ReplicaTag,
    WorkerAddress,
    WorkerInfo,
)
from daskserve.control.observed.folder_reads import FolderReads
from daskserve.control.observed.lifecycle import ReplicaEvent
from daskserve.control.observed.live import LiveMetrics
from daskserve.control.observed.loads import Loads
from daskserve.control.observed.multiplexed import MultiplexedModels
from daskserve.control.observed.reports import PublishedReports
from daskserve.control.observed.rollout_counts import RolloutCounts
from daskserve.control.observed.router_errors import RouterErrors
from daskserve.control.records.models import ModelReport, rollout_tag
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.version_split import kept_tag
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.payload.error_text import summary_of

#: Number of samples that are kept for each autoscaled backend, for `explain`.
KEPT_SAMPLES = 10
#: Number of dead replicas that are kept for each backend, for the status.
KEPT_DEAD = 10
#: Number of withdrawn calls that are remembered, because a call may arrive just after its withdrawal.
MAX_WITHDRAWN = 100
#: Number of characters at the end of a dead replica's traceback that are kept.
TRACEBACK_LENGTH = 4000


@dataclass(slots=True)
class Scaling:
    """The last decision of a backend's autoscaler, and the state on which it was based.

    Attributes
    ----------
    options, based_on
        The autoscaler's options and the target number of replicas at the time of the decision.
    replicas, wanted : int
        The new target number, and the number that the policy wants without delays.
    samples : tuple
        The last samples, oldest first.
    """

    at: float
    options: AutoscalingConfig | None
    based_on: int
    replicas: int
    wanted: int
    reason: str
    samples: tuple[Sample, ...] = ()

    def is_for(self, backend: BackendRecord) -> bool:
        """Return whether this decision changes the backend's number of replicas and still applies to it."""
        return (
            backend.scaled_to == self.based_on != self.replicas
            and backend.autoscaling == self.options
            and not backend.is_deleting
        )

    def note(self, sample: Sample, before: tuple[Sample, ...]) -> None:
        """Keep the newest sample with those before it."""
        self.samples = (*before, sample)[-KEPT_SAMPLES:]


@dataclass(frozen=True, slots=True)
class DeadReplica:
    """A replica that was lost or failed, at a time in seconds since the epoch.

    Its last log lines and the traceback of user code are empty if they were lost with the worker.
    """

    name: str
    reason: str
    at: float
    user_traceback: str = ""
    last_lines: tuple[str, ...] = ()
    #: The version of its code; restart loops are detected per version.
    version: str = ""


class Activity(NamedTuple):
    """The step of an actor that starts, is reconfigured or drains, and its duration in seconds."""

    what: str
    for_s: float = 0.0


@dataclass(slots=True)
class Notes:
    """The memory of one backend's steps: a step changes a copy, and `Observed.learn` keeps it.

    Attributes
    ----------
    failures : int
        Number of consecutive constructor failures without a goal.
    retry_at : float or None
        The earliest time to start another replica after these failures.
    waiting : str or None
        The reason why replicas wait.
    full_since : float or None
        Since when a rollout has had no room for an additional replica, or ``max_surge`` is 0.
    full_from : float or None
        Since when replicas have waited for room, and nothing indicates that room becomes free.
    most : tuple of str and int
        The pending goal, and the largest number of replicas that have run its version at once.
    logged_at : float or None
        When the log last showed the reason why the change waits.
    unloadable : str or None
        Why the last replica could not load its code; None after a replica has loaded it.
    goal : str or None
        The pending goal in the last step.
    drained_at_once : int
        Number of old replicas of one worker that this rollout stops together, to make room for a new one.
    dead : tuple
        The last replicas that died, oldest first.
    stays : str or None
        The replica that was to move to a better worker, but stays. This field and ``deadlines``,
        ``configured`` and ``reconfigure_failed`` are valid for one step only.
    rollout : tuple
        The current phase of the rollout, and when it began.
    deadlines : dict
        Deadlines of goals that this step has set.
    configured, reconfigure_failed : dict
        Answers to reconfigurations that this step processed.
    """

    failures: int = 0
    retry_at: float | None = None
    waiting: str | None = None
    full_since: float | None = None
    full_from: float | None = None
    most: tuple[GoalId | None, int] = (None, 0)
    logged_at: float | None = None
    unloadable: str | None = None
    goal: GoalId | None = None
    drained_at_once: int = 1
    dead: tuple[DeadReplica, ...] = ()
    rollout: tuple[str, float] = ("", 0.0)
    stays: ReplicaTag | None = None
    deadlines: dict[GoalId, float] = field(default_factory=dict)
    configured: dict[ReplicaTag, str] = field(default_factory=dict)
    reconfigure_failed: dict[ReplicaTag, BaseException] = field(default_factory=dict)

    def for_next_step(self) -> Notes:
        """Return a copy without the fields that are valid for only one step."""
        return replace(self, stays=None, deadlines={}, configured={}, reconfigure_failed={})

    def steady(self) -> Notes:
        """Return the notes to keep after a change has ended: only those about dead replicas."""
        return Notes(dead=self.dead) if self.is_steady and not self.are_new else self

    @property
    def are_new(self) -> bool:
        """Whether all fields have their initial values."""
        values, of_new = _values_of_notes(frozenset())
        found: bool = values(self) == of_new
        return found

    @property
    def is_steady(self) -> bool:
        """Whether all fields that matter without a change have their initial values."""
        values, of_new = _values_of_notes(_LEFT_OVER)
        found: bool = values(self) == of_new
        return found

    def is_pausing(self, now: float) -> bool:
        """Return whether it is too early to start another replica after a failure."""
        return self.retry_at is not None and self.retry_at > now


#: The fields that only matter during a change.
_LEFT_OVER = frozenset({"dead", "goal", "logged_at", "full_from", "most"})


@cache
def _values_of_notes(but: frozenset[str]) -> tuple[Callable[[Notes], Any], Any]:
    """Return a function that reads all fields except some, and the initial values of those it reads."""
    values = attrgetter(*(each.name for each in fields(Notes) if each.name not in but))
    return values, values(Notes())


@dataclass(slots=True)
class Observed:
    """The observations by replica, proxy and worker."""

    workers: dict[WorkerAddress, WorkerInfo] = field(default_factory=dict)
    #: Number of received messages about workers.
    worker_events: int = 0
    #: The ids of withdrawn calls, which may not have arrived yet.
    withdrawn: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_WITHDRAWN))
    #: The option ``system_workers``.
    system_workers: tuple[str, ...] = ()
    #: Whether there was a worker for the controller and the proxies when this was last logged.
    had_system_workers: bool = True
    #: Workers that have left the scheduler, until their last record is removed.
    lost_workers: set[WorkerAddress] = field(default_factory=set)
    #: The facts of the replicas that have answered this controller.
    ready: dict[ReplicaTag, dict[str, Any]] = field(default_factory=dict)
    #: Replicas whose health checks failed, with the details.
    unhealthy: dict[ReplicaTag, str] = field(default_factory=dict)
    #: The last log lines of unhealthy replicas.
    last_lines: dict[ReplicaTag, tuple[str, ...]] = field(default_factory=dict)
    #: Replicas whose processes have received SIGTERM.
    terminating: set[ReplicaTag] = field(default_factory=set)
    #: Workers that the scheduler lists, but whose processes do not answer.
    unresponsive: set[WorkerAddress] = field(default_factory=set)
    #: For each worker: the workers that it does not reach directly, with the route to each.
    broken_routes: dict[WorkerAddress, Mapping[WorkerAddress, str]] = field(default_factory=dict)
    #: The log files of the actors of each worker, by the actor's name without the instance's name.
    log_files: dict[WorkerAddress, Mapping[str, str]] = field(default_factory=dict)
    failed: dict[ReplicaTag, BaseException] = field(default_factory=dict)
    #: The reported activities of replicas that start, are reconfigured or drain.
    busy: dict[ReplicaTag, Activity] = field(default_factory=dict)
    gone: set[ReplicaTag] = field(default_factory=set)
    #: Confirmed config ids of replicas that their records do not have yet.
    configured: dict[ReplicaTag, str] = field(default_factory=dict)
    reconfigure_failed: dict[ReplicaTag, BaseException] = field(default_factory=dict)
    #: The known rank and number of replicas that each replica runs with.
    rank_infos: dict[ReplicaTag, RankInfo] = field(default_factory=dict)
    #: The last result of the user's ``record_routing_stats``.
    routing_stats: PublishedReports = field(default_factory=lambda: PublishedReports("stats"))
    #: The models that replicas have loaded from a ``model_repository``.
    models: dict[ReplicaTag, ModelReport] = field(default_factory=dict)
    #: The models that the multiplexed functions of replicas have loaded.
    multiplexed: MultiplexedModels = field(default_factory=MultiplexedModels)
    #: Reads the folders of models.
    folders: FolderReads = field(default_factory=FolderReads)
    #: Why the folder of models of a backend cannot be read.
    model_problems: dict[BackendTag, str] = field(default_factory=dict)
    #: The memory of each backend's steps.
    notes: dict[BackendTag, Notes] = field(default_factory=dict)
    #: The unexpected error of the last step of a backend, until a step succeeds.
    step_failures: dict[BackendTag, str] = field(default_factory=dict)
    #: The failure of each backend that was logged last, and the time of that.
    logged_failures: dict[BackendTag, tuple[str, float]] = field(default_factory=dict)
    #: The replica that moves to a better worker; see `daskserve.control.placement.rebalancing`.
    moving: ReplicaTag | None = None
    #: The published set of backends that should run and have no running replica.
    unready: frozenset[BackendTag] = frozenset()
    #: Whether the cluster removes empty workers, as under ``cluster.adapt()``.
    is_adaptive: bool = False
    #: The load that routers and replicas have reported.
    loads: Loads = field(default_factory=Loads)
    #: The rates over the last second, while a client reads them.
    live: LiveMetrics = field(default_factory=LiveMetrics)
    #: The faults of the users' request routers.
    router_errors: RouterErrors = field(default_factory=RouterErrors)
    #: The routers' counts of both versions of each rollout.
    rollouts: RolloutCounts = field(default_factory=RolloutCounts)
    #: The last decisions of the autoscalers.
    scalings: dict[BackendTag, Scaling] = field(default_factory=dict)
    deadlines: dict[GoalId, float] = field(default_factory=dict)
    #: The pending goals of earlier controllers.
    inherited: frozenset[GoalId] = frozenset()
    proxies_ready: dict[str, dict[str, Any]] = field(default_factory=dict)
    proxies_failed: dict[str, BaseException] = field(default_factory=dict)
    #: The tags of leaving proxies that have stopped.
    proxies_gone: set[str] = field(default_factory=set)
    #: Since when a proxy has had a reason to move to another host, by name.
    proxies_apart: dict[str, float] = field(default_factory=dict)

    def marked(self, worker: WorkerInfo) -> WorkerInfo:
        """Return a worker marked as a system worker, if it is kept for the controller and the proxies."""
        return replace(worker, is_system=worker.matches(self.system_workers))

    def has_system_workers(self) -> bool:
        """Whether a worker for the controller and the proxies exists, if ``system_workers`` is set."""
        return not self.system_workers or any(each.is_system for each in self.workers.values())

    def stray(self, worker: WorkerAddress | None) -> str:
        """Return why the controller or a proxy is not on a system worker; empty if it is on one."""
        known = self.workers.get(worker or "")
        if not self.system_workers or known is None or known.is_system:
            return ""
        names = ", ".join(map(repr, self.system_workers))
        where = "are about to be used again" if self.has_system_workers() else "are not in the cluster"
        return f"on a worker of replicas: system_workers ({names}) {where}"

    def retiring(self) -> set[WorkerAddress]:
        """Return the workers that are retiring from the cluster."""
        return {address for address, info in self.workers.items() if info.is_retiring}

    def retiring_of(self, replicas: Iterable[ReplicaRecord]) -> set[WorkerAddress]:
        """Return the retiring workers of some replicas, without iterating over all workers."""
        known = self.workers
        places = (worker for each in replicas for worker in (each.worker, *each.bundle_workers))
        return {worker for worker in places if worker in known and known[worker].is_retiring}

    def usable_workers(self) -> list[WorkerInfo]:
        """Return the workers that may get new actors."""
        away = self.unresponsive
        return [
            info
            for info in self.workers.values()
            if not (info.is_retiring or (away and info.address in away))
        ]

    def host_of(self, worker: WorkerAddress) -> str:
        """Return the host of a worker; an unknown worker is its own host."""
        info = self.workers.get(worker)
        return worker if info is None else info.host

    def cleared_workers(self) -> list[WorkerInfo]:
        """Return the usable workers, except those that rejoined before their loss was processed."""
        usable, lost = self.usable_workers(), self.lost_workers
        return [info for info in usable if info.address not in lost] if lost else usable

    def event_of(self, replica: ReplicaRecord) -> ReplicaEvent | None:
        """Return the event of a replica that its record does not reflect yet; None if there is none.

        1. Its worker was lost.
        2. It should serve but cannot: its health checks fail, its process does not answer, or the worker of
           another bundle of its placement group was lost or does not answer.
        3. It failed, in its constructor or later.
        4. It has started.
        5. It has stopped. A replica on a worker that does not answer counts as stopped: if the worker
           resumes, the replica is stopped as an orphan.
        """
        tag, state, worker = replica.tag, replica.state, replica.worker
        is_wanted = state in (ReplicaState.STARTING, ReplicaState.RUNNING)
        is_silent = worker in self.unresponsive
        if worker is not None and worker in self.lost_workers:
            return ReplicaEvent.LOST
        if is_wanted and (is_silent or tag in self.unhealthy or self._lost_bundle(replica) is not None):
            return ReplicaEvent.UNWANTED
        if is_wanted and tag in self.failed:
            return ReplicaEvent.FAILED
        if state is ReplicaState.STARTING and tag in self.ready:
            return ReplicaEvent.STARTED
        if state is ReplicaState.STOPPING and (is_silent or tag in self.gone):
            return ReplicaEvent.GONE
        return None

    def death_of(self, replica: ReplicaRecord, event: ReplicaEvent, wall: float) -> DeadReplica | None:
        """Return the death of a replica that should run; None if it lives or was stopping."""
        tag, worker = replica.tag, replica.worker
        if replica.state not in (ReplicaState.STARTING, ReplicaState.RUNNING):
            return None
        if event is ReplicaEvent.LOST:
            return DeadReplica(tag, f"worker {worker} left the cluster", wall)
        if event is ReplicaEvent.FAILED:
            error = self.failed[tag]
            user_traceback = str(getattr(error, "user_traceback", ""))[-TRACEBACK_LENGTH:]
            lines = tuple(getattr(error, LAST_LINES, ()))
            return DeadReplica(tag, summary_of(error), wall, user_traceback, lines)
        if event is ReplicaEvent.UNWANTED:
            why = (
                f"worker {worker} does not answer" if worker in self.unresponsive else self.unhealthy.get(tag)
            )
            if why is None:
                number = self._lost_bundle(replica) or 0
                lost = replica.bundle_workers[number]
                how = "left the cluster" if lost in self.lost_workers else "does not answer"
                why = f"worker {lost}, which has bundle {number} of its placement group, {how}"
            return DeadReplica(tag, why, wall, "", self.last_lines.get(tag, ()))
        return None

    def _lost_bundle(self, replica: ReplicaRecord) -> int | None:
        """Return the number of the first bundle whose worker was lost or does not answer; None if there is
        none."""
        workers = enumerate(replica.bundle_workers)
        gone = (n for n, each in workers if each in self.lost_workers or each in self.unresponsive)
        return next(gone, None)

    def change_worker(self, worker: WorkerAddress, **changes: Any) -> None:
        """Change some fields of a worker, if it is in the cluster."""
        known = self.workers.get(worker)
        if known is not None:
            self.workers[worker] = replace(known, **changes)

    def note_taken(self, taken: Mapping[WorkerAddress, Mapping[str, float]]) -> list[BackendTag]:
        """Record the resources held by Dask's tasks; return the backends whose replicas wait for room."""
        for worker, amounts in taken.items():
            self.change_worker(worker, taken_by_tasks=amounts)
        return [tag for tag, notes in self.notes.items() if notes.waiting is not None]

    def notes_of(self, tag: BackendTag) -> Notes:
        """Return the notes about a backend."""
        return self.notes.get(tag) or Notes()

    def why_waiting(self, tags: Iterable[BackendTag]) -> str | None:
        """Return why replicas wait, from the first of these backends that has a reason."""
        found = (self.notes_of(tag).waiting for tag in tags)
        return next((why for why in found if why is not None), None)

    @property
    def unloadable(self) -> dict[BackendTag, str]:
        """The reasons why replicas cannot load their code, by backend."""
        found = ((tag, each.unloadable) for tag, each in list(self.notes.items()))
        return {tag: why for tag, why in found if why is not None}

    def learn(self, tag: BackendTag, notes: Notes) -> None:
        """Keep the notes of a backend's step."""
        if notes.are_new:
            self.notes.pop(tag, None)
            return  # as after nearly all steps
        kept = notes.for_next_step()
        kept.dead = kept.dead[-KEPT_DEAD:]
        if kept.are_new:
            self.notes.pop(tag, None)
        else:
            self.notes[tag] = kept
        if notes.stays is not None and notes.stays == self.moving:
            self.moving = None
        self.deadlines.update(notes.deadlines)
        # A replica may have answered again in the meantime; that answer is kept for the next step.
        for replica, config_id in notes.configured.items():
            if self.configured.get(replica) == config_id:
                del self.configured[replica]
        for replica, error in notes.reconfigure_failed.items():
            if self.reconfigure_failed.get(replica) is error:
                del self.reconfigure_failed[replica]

    def forget_rollout(self, tag: BackendTag) -> None:
        """Drop the observations of a rollout that has ended."""
        self.rollouts.forget(tag)
        self.notes.pop(kept_tag(tag), None)

    def learn_proxies(self, lost: Iterable[str], apart: Mapping[str, float]) -> None:
        """Apply the result of a step of the proxies; lost proxies no longer listen."""
        for name in lost:
            self.proxies_ready.pop(name, None)
            self.proxies_failed.pop(name, None)
        self.proxies_apart = dict(apart)

    def forget_proxy(self, tag: str) -> None:
        """Drop the observations of a proxy whose record was removed."""
        self.proxies_gone.discard(tag)
        self.proxies_failed.pop(tag, None)
        self.live.forget_proxy(tag)

    def learn_models(
        self, replica: ReplicaRecord, facts: Mapping[str, Any], going_on: Collection[str]
    ) -> None:
        """Record a replica's report of its models, and its counts of the active rollouts."""
        self.models[replica.tag] = ModelReport.of(facts)
        splits = {name: each for name, each in facts.get("splits", {}).items() if name in going_on}
        self.rollouts.report(
            replica.tag, {rollout_tag(replica.backend, name): each for name, each in splits.items()}
        )

    def forget_backend(self, tag: BackendTag) -> None:
        """Drop the observations of a backend whose record was removed."""
        self.notes.pop(tag, None)
        self.forget_rollout(tag)
        self.step_failures.pop(tag, None)
        self.logged_failures.pop(tag, None)
        self.model_problems.pop(tag, None)
        self.router_errors.forget(tag)

    def take_reports(self) -> dict[str, Any]:
        """Return the reports of replicas to publish, by key, that have changed since the last call."""
        return {**self.multiplexed.take_changes(), **self.routing_stats.take_changes()}

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop the observations of a replica whose record was removed."""
        levels: tuple[dict[ReplicaTag, Any], ...] = (
            *(self.ready, self.failed, self.unhealthy, self.last_lines, self.busy, self.models),
            *(self.configured, self.reconfigure_failed, self.rank_infos),
        )
        for level in levels:
            level.pop(tag, None)
        for reports in (self.multiplexed, self.routing_stats, self.loads, self.live):
            reports.forget_replica(tag)
        self.gone.discard(tag)
        self.terminating.discard(tag)
        if self.moving == tag:
            self.moving = None
