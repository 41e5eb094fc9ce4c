"""Both versions of a backend during a rollout: their records, replicas and traffic. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, ReplicaState
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.records.storing.encoding import from_plain


def stable_of(backend: BackendRecord) -> BackendRecord | None:
    """Return the record of the old version during a rollout; None without one.

    The target capacity, and the number set by an autoscaler, an external scaler or an operator, are taken
    from the new version.
    """
    rollout = backend.canary
    if rollout is None:
        return None
    stable: BackendRecord = from_plain(BackendRecord.KIND, rollout.stable)
    is_scaled = stable.autoscaling is not None or stable.is_scaled_externally or backend.autoscaling is None
    return replace(
        stable,
        scaled_to=backend.scaled_to if is_scaled and backend.scaled_to is not None else stable.scaled_to,
        capacity=backend.capacity,
        capacity_direction=backend.capacity_direction,
        goal=None,
    )


def record_of(state: State, replica: ReplicaRecord) -> BackendRecord:
    """Return the backend record of the version of a replica."""
    backend = state.backends[replica.backend]
    rollout = backend.canary
    if rollout is not None and replica.version == rollout.stable["version"]:
        return stable_of(backend) or backend
    return backend


@dataclass(frozen=True, slots=True)
class Split:
    """The traffic of the new version: its share, and the key under which requests are counted."""

    share: float
    key: str


def kept_tag(tag: BackendTag) -> str:
    """Return the key of the notes about the replicas of the old version."""
    return f"{tag}#kept"


def running_of(
    backend: BackendRecord, replicas: Iterable[ReplicaRecord]
) -> tuple[list[ReplicaRecord], list[ReplicaRecord]]:
    """Return the running replicas of the new version and of the old version."""
    rollout, running = backend.canary, [each for each in replicas if each.state is ReplicaState.RUNNING]
    stable = None if rollout is None else rollout.stable["version"]
    return (
        [each for each in running if each.version == backend.version],
        [each for each in running if each.version == stable],
    )


def split_of(backend: BackendRecord, new: Collection[ReplicaRecord], old: Collection[ReplicaRecord]) -> Split:
    """Return the current split of a backend with a rollout, given the running replicas of both versions.

    While one version has no replicas, the other one gets all requests. They are counted separately from the
    requests at the planned share.
    """
    rollout, config = backend.canary, backend.config.rollout
    planned = 0.0
    if rollout is not None and config is not None and rollout.served >= 0:
        planned = config.shares[min(rollout.served, len(config.steps) - 1)]
    share = planned
    if bool(new) is not bool(old):
        share = 1.0 if new else 0.0
    served = -1 if rollout is None else rollout.served
    return Split(share, f"{'' if rollout is None else rollout.rollout_id}/{served}/{share}")
