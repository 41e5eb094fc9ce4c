"""The two versions of a backend during a rollout: their records, replicas and shares of the traffic. Pure."""

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

    Decisions of the instance, the load or an external scaler are the same as for the new version.
    """
    rollout = backend.canary
    if rollout is None:
        return None
    stable: BackendRecord = from_plain(BackendRecord.KIND, rollout.stable)
    is_scaled = stable.autoscaling is not None or stable.is_scaled_externally
    return replace(
        stable,
        scaled_to=backend.scaled_to if is_scaled and backend.scaled_to is not None else stable.scaled_to,
        capacity=backend.capacity,
        capacity_direction=backend.capacity_direction,
        goal=None,
    )


def record_of(state: State, replica: ReplicaRecord) -> BackendRecord:
    """Return the record with the spec of a replica: that of its version."""
    backend = state.backends[replica.backend]
    rollout = backend.canary
    if rollout is not None and replica.version == rollout.stable["version"]:
        return stable_of(backend) or backend
    return backend


@dataclass(frozen=True, slots=True)
class Split:
    """The traffic of both versions: the share of the new one, and the key under which it is counted."""

    share: float
    key: str


def kept_tag(tag: BackendTag) -> str:
    """Return the key of the notes about the replicas of the old version."""
    return f"{tag}#kept"


def running_of(
    backend: BackendRecord, replicas: Iterable[ReplicaRecord]
) -> tuple[list[ReplicaRecord], list[ReplicaRecord]]:
    """Return the running replicas of the new version, and those of the old one; others end."""
    rollout, running = backend.canary, [each for each in replicas if each.state is ReplicaState.RUNNING]
    stable = None if rollout is None else rollout.stable["version"]
    return (
        [each for each in running if each.version == backend.version],
        [each for each in running if each.version == stable],
    )


def split_of(backend: BackendRecord, new: Collection[ReplicaRecord], old: Collection[ReplicaRecord]) -> Split:
    """Return the present split of a backend with a rollout, given the running replicas of both versions.

    Requests do not wait for a version without replicas while the other one has some. They are counted apart
    from those of the planned share.
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
