"""What the acting layer has seen of the cluster: levels that stay until they are no longer true.

Nothing here is stored: a new controller sees it all again by asking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.context import Sample
from daskserve.control.loads import Loads
from daskserve.control.records import BackendRecord, ReplicaRecord
from daskserve.control.replica_lifecycle import ReplicaEvent
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.types import BackendTag, GoalId, ReplicaState, ReplicaTag, WorkerAddress, WorkerInfo

#: Samples of each autoscaled backend that people may look at.
KEPT_SAMPLES = 10


@dataclass(slots=True)
class Scaling:
    """What the autoscaler of a backend decided last, and on what it was based.

    Attributes
    ----------
    options, based_on
        The autoscaler's options, and how many replicas were wanted until then.
    replicas, wanted : int
        How many there should be from now on, and how many the policy would have if nothing held it back.
    samples : tuple
        The last ones, oldest first.
    """

    at: float
    options: AutoscalingConfig | None
    based_on: int
    replicas: int
    wanted: int
    reason: str
    samples: tuple[Sample, ...] = ()

    def is_for(self, backend: BackendRecord) -> bool:
        """Whether this changes the number of a backend that is still as it was."""
        return (
            backend.scaled_to == self.based_on != self.replicas
            and backend.autoscaling == self.options
            and not backend.is_deleting
        )

    def note(self, sample: Sample, before: tuple[Sample, ...]) -> None:
        """Keep the newest sample with those before it."""
        self.samples = (*before, sample)[-KEPT_SAMPLES:]


@dataclass(slots=True)
class Notes:
    """What a step about one backend knows of it afterwards; `Observed.learn` takes it over.

    Attributes
    ----------
    failures : int
        Constructors that failed in a row outside any goal.
    retry_at : float or None
        The earliest time to start another replica after that.
    waiting : str or None
        Why replicas wait, for people to read.
    deadlines : dict
        Until when a goal may take that this step saw first.
    configured, reconfigure_failed : dict
        Answers to reconfigurations that this step took in.
    """

    failures: int = 0
    retry_at: float | None = None
    waiting: str | None = None
    deadlines: dict[GoalId, float] = field(default_factory=dict)
    configured: dict[ReplicaTag, str] = field(default_factory=dict)
    reconfigure_failed: dict[ReplicaTag, BaseException] = field(default_factory=dict)


@dataclass(slots=True)
class Observed:
    """Levels by replica, proxy and worker."""

    workers: dict[WorkerAddress, WorkerInfo] = field(default_factory=dict)
    #: Workers that the scheduler told us are gone, until their last record is removed.
    lost_workers: set[WorkerAddress] = field(default_factory=set)
    #: Replicas that answered to this controller, with the facts they gave.
    ready: dict[ReplicaTag, dict[str, Any]] = field(default_factory=dict)
    #: Replicas whose own probes failed, with what they found.
    unhealthy: dict[ReplicaTag, str] = field(default_factory=dict)
    #: Workers whose process does not answer though the scheduler still has them.
    unresponsive: set[WorkerAddress] = field(default_factory=set)
    failed: dict[ReplicaTag, BaseException] = field(default_factory=dict)
    gone: set[ReplicaTag] = field(default_factory=set)
    #: The config each replica runs with, as far as it differs from its record.
    configured: dict[ReplicaTag, str] = field(default_factory=dict)
    reconfigure_failed: dict[ReplicaTag, BaseException] = field(default_factory=dict)
    #: Not before this time may a backend whose replicas keep failing start another.
    retry_at: dict[BackendTag, float] = field(default_factory=dict)
    failures: dict[BackendTag, int] = field(default_factory=dict)
    #: Why a backend's replicas wait, for people to read.
    waiting: dict[BackendTag, str] = field(default_factory=dict)
    #: Whether workers that hold nothing are given back, as under ``cluster.adapt()``.
    is_adaptive: bool = False
    #: What routers and replicas told of their load.
    loads: Loads = field(default_factory=Loads)
    #: What the autoscalers decided last.
    scalings: dict[BackendTag, Scaling] = field(default_factory=dict)
    deadlines: dict[GoalId, float] = field(default_factory=dict)
    proxies_ready: dict[str, dict[str, Any]] = field(default_factory=dict)
    proxies_failed: dict[str, BaseException] = field(default_factory=dict)

    def retiring(self) -> set[WorkerAddress]:
        """Return the workers that are to leave the cluster in order."""
        return {address for address, info in self.workers.items() if info.is_retiring}

    def usable_workers(self) -> list[WorkerInfo]:
        """Return the workers that may get something new, as far as is known."""
        return [
            info
            for address, info in self.workers.items()
            if address not in self.unresponsive and not info.is_retiring
        ]

    def event_of(self, replica: ReplicaRecord) -> ReplicaEvent | None:
        """Return what has happened to a replica since its record was written; None if nothing has.

        1. Its worker is gone.
        2. It should serve and cannot: its probes fail, or its process does not answer.
        3. It failed, in its constructor or later.
        4. It has started.
        5. It has stopped. One on a worker that does not answer counts as stopped: if the worker wakes up,
           the replica is ended as an orphan.
        """
        tag, state, worker = replica.tag, replica.state, replica.worker
        is_wanted = state in (ReplicaState.STARTING, ReplicaState.RUNNING)
        is_silent = worker in self.unresponsive
        if worker is not None and worker in self.lost_workers:
            return ReplicaEvent.LOST
        if is_wanted and (is_silent or tag in self.unhealthy):
            return ReplicaEvent.UNWANTED
        if is_wanted and tag in self.failed:
            return ReplicaEvent.FAILED
        if state is ReplicaState.STARTING and tag in self.ready:
            return ReplicaEvent.STARTED
        if state is ReplicaState.STOPPING and (is_silent or tag in self.gone):
            return ReplicaEvent.GONE
        return None

    def notes(self, tag: BackendTag) -> Notes:
        """Return what is known of a backend, for a step to go on from."""
        return Notes(self.failures.get(tag, 0), self.retry_at.get(tag), self.waiting.get(tag))

    def learn(self, tag: BackendTag, notes: Notes) -> None:
        """Take over what a step about a backend has learnt."""
        _put(self.failures, tag, notes.failures or None)
        _put(self.retry_at, tag, notes.retry_at)
        _put(self.waiting, tag, notes.waiting)
        self.deadlines.update(notes.deadlines)
        # A replica may have answered again meanwhile: that answer stays, for the next step.
        for replica, config_id in notes.configured.items():
            if self.configured.get(replica) == config_id:
                del self.configured[replica]
        for replica, error in notes.reconfigure_failed.items():
            if self.reconfigure_failed.get(replica) is error:
                del self.reconfigure_failed[replica]

    def forget_proxies(self, names: Iterable[str]) -> None:
        """Drop what was seen of proxies whose workers are gone."""
        for name in names:
            self.proxies_ready.pop(name, None)
            self.proxies_failed.pop(name, None)

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop what was seen of a replica whose record is gone."""
        for levels in (self.ready, self.failed, self.unhealthy, self.configured, self.reconfigure_failed):
            levels.pop(tag, None)
        self.gone.discard(tag)
        self.loads.forget_replica(tag)


def _put(levels: dict[BackendTag, Any], tag: BackendTag, value: Any) -> None:
    if value is None:
        levels.pop(tag, None)
    else:
        levels[tag] = value
