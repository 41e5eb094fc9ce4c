"""What the acting layer has seen of the cluster: levels that stay until they are no longer true.

Nothing here is stored: a new controller sees it all again by asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.context import Sample
from daskserve.control.loads import Loads
from daskserve.control.records import BackendRecord
from daskserve.types import BackendTag, GoalId, ReplicaTag, WorkerAddress, WorkerInfo

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
    options: Mapping[str, Any]
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

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop what was seen of a replica whose record is gone."""
        for levels in (self.ready, self.failed, self.unhealthy, self.configured, self.reconfigure_failed):
            levels.pop(tag, None)
        self.gone.discard(tag)
        self.loads.forget_replica(tag)
