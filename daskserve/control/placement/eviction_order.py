"""The load of replicas and workers, used to choose which replicas to stop. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from daskserve.common.types import ReplicaTag, WorkerAddress
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State

#: Number of replicas that a proxy or the controller counts as, so that its worker is emptied last.
KEPT_WORKER = 1_000_000


@dataclass(frozen=True, slots=True)
class EvictionCriteria:
    """The criteria by which replicas are chosen to stop.

    Attributes
    ----------
    ongoing : mapping
        The known number of running requests of each replica.
    others : callable
        Returns the number of actors on a worker besides replicas of this backend.
    empties_workers : bool
        Whether to empty workers, because the cluster then removes them. Otherwise replicas stay spread.
    """

    ongoing: Mapping[ReplicaTag, float] = field(default_factory=dict)
    others: Callable[[WorkerAddress], int] = lambda worker: 0
    empties_workers: bool = False


def criteria_of(
    state: State,
    observed: Observed,
    backend: BackendRecord,
    replicas: Iterable[ReplicaTag],
    avoid: Collection[WorkerAddress],
    now: float,
) -> EvictionCriteria:
    """Return the criteria of a backend; ``avoid`` are the workers of the controller and proxies."""

    def others(worker: WorkerAddress) -> int:
        # The controller and proxies keep their worker in any case.
        fixed = KEPT_WORKER if worker in avoid else 0
        return fixed + state.count_on(worker) - state.count_on(worker, backend.tag)

    empties_workers = observed.is_adaptive or backend.config.placement == "PACK"
    return EvictionCriteria(observed.loads.ongoing(replicas, now), others, empties_workers)
