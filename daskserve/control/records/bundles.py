"""The places of a replica: the bundles of resources that it occupies, and on which workers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from daskserve.common.types import WorkerAddress
from daskserve.control.records.records import ReplicaRecord


def bundles_of(replica: ReplicaRecord) -> tuple[Mapping[str, float], ...]:
    """Return the amounts that a replica needs, its own first, and then those of its placement group."""
    return replica.bundles or (replica.demand,)


def places_of(replica: ReplicaRecord) -> Sequence[tuple[WorkerAddress, Mapping[str, float]]]:
    """Return the workers and resources of a replica, its own first; empty before it is placed."""
    if replica.worker is None:
        return ()
    workers = replica.bundle_workers or (replica.worker,)
    return tuple(zip(workers, bundles_of(replica), strict=True))


def is_on(replica: ReplicaRecord, workers: Collection[WorkerAddress]) -> bool:
    """Return whether a replica has a place on any of these workers."""
    if not workers:
        return False  # as for nearly all replicas: no worker retires
    return replica.worker in workers or any(each in workers for each in replica.bundle_workers)
