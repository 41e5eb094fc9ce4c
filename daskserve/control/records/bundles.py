"""The bundles of resources that a replica occupies, and their workers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from daskserve.common.types import WorkerAddress
from daskserve.control.records.records import ReplicaRecord
from daskserve.options.actor import ACCELERATOR

#: Tolerance for the rounding errors of sums.
TOLERANCE = 1e-9


def bundles_of(replica: ReplicaRecord) -> tuple[Mapping[str, float], ...]:
    """Return the bundles of a replica: its own, then the others of its placement group."""
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
        return False  # the usual case: no worker is retiring
    return replica.worker in workers or any(each in workers for each in replica.bundle_workers)


class OccupiedResources:
    """The amounts that replicas occupy on each worker, by resource.

    Attributes
    ----------
    used : mapping
        All bundles.
    by_replicas : mapping
        The first bundle of each replica, which Dask's tasks cannot use. The other bundles of placement groups
        are for tasks. If the CPU amounts on a worker add up to less than one thread, they are left out.
    """

    def __init__(self) -> None:
        self.used: dict[WorkerAddress, dict[str, float]] = {}
        self.by_replicas: dict[WorkerAddress, dict[str, float]] = {}
        self._own: dict[WorkerAddress, dict[str, float]] = {}

    def add(self, replica: ReplicaRecord, sign: int) -> None:
        """Add a replica, or with a ``sign`` of -1 remove it."""
        for worker, amounts in places_of(replica):
            _add(self.used.setdefault(worker, {}), amounts, sign)
        if replica.worker is not None:
            own = self._own.setdefault(replica.worker, {})
            _add(own, replica.demand, sign)
            self._note(replica.worker, own)

    def drop(self, worker: WorkerAddress) -> None:
        """Remove an empty worker, together with the rounding errors of its sums."""
        for known in (self.used, self._own, self.by_replicas):
            known.pop(worker, None)

    def _note(self, worker: WorkerAddress, own: Mapping[str, float]) -> None:
        found = {
            name: amount
            for name, amount in own.items()
            if amount > (1 if name == "CPU" else 2 * TOLERANCE) - TOLERANCE
            and not name.startswith(ACCELERATOR)
        }
        if found:
            self.by_replicas[worker] = found
        else:
            self.by_replicas.pop(worker, None)


def _add(sums: dict[str, float], amounts: Mapping[str, float], sign: int) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0) + sign * amount
