"""The actions of a backend's step on its replicas; `daskserve.control.action_executor` executes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from daskserve.control.records.records import ReplicaRecord


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
