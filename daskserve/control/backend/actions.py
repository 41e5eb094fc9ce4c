"""The actions of a backend's step on its replicas; `daskserve.control.action_executor` executes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from daskserve.control.records.records import BackendRecord, ReplicaRecord


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Create the replica's actor, or find it if an older controller created it."""

    replica: ReplicaRecord


@dataclass(frozen=True, slots=True)
class StopReplica:
    """Let the replica finish its requests within the grace period, then stop it."""

    replica: ReplicaRecord
    grace_s: float


@dataclass(frozen=True, slots=True)
class ReconfigureReplica:
    """Send the backend's current config to the replica."""

    replica: ReplicaRecord


Action: TypeAlias = StartReplica | StopReplica | ReconfigureReplica


def grace_of(backend: BackendRecord, replica: ReplicaRecord) -> float:
    """Return how long a replica may finish its requests, in seconds."""
    if backend.is_forced or replica.is_forced:
        return 0.0
    return backend.config.experimental_graceful_shutdown_timeout_s
