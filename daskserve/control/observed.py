"""What the acting layer has seen of the cluster: levels that stay until they are no longer true.

Nothing here is stored: a new controller sees it all again by asking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from daskserve.types import BackendTag, GoalId, ReplicaTag, WorkerAddress, WorkerInfo


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
    #: What routers reported of their queues: router -> backend -> requests that wait.
    queue_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
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
