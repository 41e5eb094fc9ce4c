"""Decides which replicas to start and stop, so that a backend reaches its target version and number.

New before old: a replica of an older version stops only after one of the target version runs, so the number
of running replicas does not fall below the target. During a rollout, at most ``max_surge`` additional
replicas exist, and ``max_unavailable`` old ones may stop before new ones run. If there is no room for an
additional replica, or both numbers are 0, `replicas_to_drain` chooses one old replica after another to make
room for a new one, which runs before the next old one stops. Several stop together only if a new replica
needs the room of several replicas on one worker.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from daskserve.common.types import ReplicaState, ReplicaTag, WorkerAddress, WorkerInfo
from daskserve.control.observed.lifecycle import STOP_ORDER, WANTED_STATES
from daskserve.control.placement.eviction_order import EvictionCriteria
from daskserve.control.placement.placement import Demand, TentativeUsage, room_for
from daskserve.control.records.records import BackendRecord, ReplicaRecord

#: States that end without a further decision: a replica is starting, or is about to free its resources.
TRANSIENT_STATES = frozenset({ReplicaState.STARTING, ReplicaState.SHOULD_STOP, ReplicaState.STOPPING})


@dataclass(frozen=True, slots=True)
class Steps:
    """The next step: the number of replicas to start, and the replicas to stop."""

    start: int
    stop: tuple[ReplicaRecord, ...]


_NO_CRITERIA = EvictionCriteria()


def next_steps(
    wanted: int,
    version: str,
    replicas: Sequence[ReplicaRecord],
    *,
    max_surge: int,
    max_unavailable: int,
    leaving: Collection[ReplicaTag] = (),
    criteria: EvictionCriteria = _NO_CRITERIA,
) -> Steps:
    """Return the next steps towards ``wanted`` replicas of ``version``.

    Replicas that are ``leaving`` their workers are treated like those of an older version. They are replaced
    before they stop even without a surge, because new replicas cannot use their room.
    """
    live = [each for each in replicas if each.state in WANTED_STATES]
    new = [each for each in live if each.version == version and each.tag not in leaving]
    old = [each for each in live if each.version != version or each.tag in leaving]
    excess = _expendable(new, max(0, len(new) - wanted), criteria)
    given_up = {each.tag for each in excess}
    new = [each for each in new if each.tag not in given_up]
    # Old replicas that do not run yet are useless.
    idle_old = [each for each in old if each.state is not ReplicaState.RUNNING]
    serving_old = [each for each in old if each.state is ReplicaState.RUNNING]
    serving_new = sum(each.state is ReplicaState.RUNNING for each in new)
    # Only an update makes replicas stop early. A retiring worker waits until its replicas are replaced.
    is_update = any(each.version != version for each in old)
    needed = max(0, wanted - max_unavailable) if is_update else wanted
    surplus = max(0, len(serving_old) + serving_new - needed)
    stop = (*excess, *idle_old, *serving_old[:surplus])
    surge = max(max_surge, any(each.tag in leaving for each in old)) if old else 0
    room = wanted + surge - (len(live) - len(stop))
    return Steps(max(0, min(wanted - len(new), room)), stop)


def replicas_to_drain(
    backend: BackendRecord,
    replicas: Sequence[ReplicaRecord],
    trial: TentativeUsage,
    workers: Sequence[WorkerInfo],
    demand: Demand,
    ongoing: Mapping[ReplicaTag, float],
) -> tuple[ReplicaRecord, ...]:
    """Return the fewest old replicas of one worker to stop, to make room for a new one.

    If a new replica cannot use their room, replicas stop one by one.

    Parameters
    ----------
    trial : TentativeUsage
        The ledger; unchanged afterwards.
    """
    old, is_useful = drainable(backend, replicas, trial, workers, demand)

    def load(replica: ReplicaRecord) -> float:
        return ongoing.get(replica.tag, 0.0)

    if not is_useful:
        return tuple(sorted(old, key=load)[:1])
    by_worker: dict[WorkerAddress | None, list[ReplicaRecord]] = {}
    for each in sorted(old, key=load):
        by_worker.setdefault(each.worker, []).append(each)
    if room_for(trial, workers, demand, 1):
        # There is room, but the limit does not allow an additional replica.
        return tuple(min(by_worker.values(), key=lambda crowd: load(crowd[0]), default=[])[:1])
    found = [_fewest(trial, workers, demand, crowd) for crowd in by_worker.values()]
    return min(filter(None, found), key=lambda stop: (len(stop), sum(map(load, stop))), default=())


def drainable(
    backend: BackendRecord,
    replicas: Sequence[ReplicaRecord],
    trial: TentativeUsage,
    workers: Sequence[WorkerInfo],
    demand: Demand,
) -> tuple[list[ReplicaRecord], bool]:
    """Return the old replicas that may stop before new ones run, and whether new ones can use their room.

    No replica may stop while another one starts or stops, so that a failure does not reduce the number
    further. None may stop if the complete rollout would not fit. If enough new replicas already run, the rest
    of the old ones may stop, even if the additional replicas that the load requires do not fit.
    """
    if any(each.state in TRANSIENT_STATES for each in replicas):
        return [], False
    running = [each for each in replicas if each.state is ReplicaState.RUNNING]
    old = [each for each in running if each.version != backend.version]
    missing = backend.needed_replicas - (len(running) - len(old))
    units = max(1, -(-missing // demand.replicas))
    with trial.without(old):
        if room_for(trial, workers, demand, units) == units:
            return old, True
    return ([] if missing > 0 else old), False


def _fewest(
    trial: TentativeUsage, workers: Sequence[WorkerInfo], demand: Demand, crowd: Sequence[ReplicaRecord]
) -> tuple[ReplicaRecord, ...]:
    """Return the fewest replicas of one worker, in order, that must stop so that a new one fits there."""

    def is_enough(stop: Sequence[ReplicaRecord]) -> bool:
        with trial.without(stop):
            return room_for(trial, workers, demand, 1, only=crowd[0].worker) == 1

    for count in range(1, len(crowd) + 1):
        if is_enough(crowd[:count]):
            stop = list(crowd[:count])
            for each in crowd[: count - 1]:
                fewer = [other for other in stop if other is not each]
                if is_enough(fewer):
                    stop = fewer
            return tuple(stop)
    return ()


def _expendable(
    replicas: Sequence[ReplicaRecord], count: int, criteria: EvictionCriteria
) -> tuple[ReplicaRecord, ...]:
    """Return the replicas to stop first: those with the least work, and among them the youngest.

    Running replicas stop on the workers with the most replicas of the backend, so that the rest stays spread.
    If the cluster removes empty workers, they stop on the emptiest workers instead.
    """
    if not count:
        return ()
    chosen: list[ReplicaRecord] = []
    same = Counter(each.worker for each in replicas)
    others = {worker: 0 if worker is None else criteria.others(worker) for worker in same}
    youngest_first = list(enumerate(reversed(replicas)))

    def rank(place: int, each: ReplicaRecord) -> tuple[float, ...]:
        worker = each.worker
        crowd = others[worker] + same[worker] if criteria.empties_workers else -same[worker]
        return (crowd, criteria.ongoing.get(each.tag, 0.0), others[worker], place)

    # A removal changes only the ranks on its worker, so compare the first replica of each worker.
    for state in STOP_ORDER:
        lines: dict[WorkerAddress | None, list[tuple[int, ReplicaRecord]]] = {}
        for place, each in youngest_first:
            if each.state is state:
                lines.setdefault(each.worker, []).append((place, each))
        for line in lines.values():
            line.sort(key=lambda entry: rank(*entry), reverse=True)
        heap = [(rank(*line[-1]), line) for line in lines.values()]
        heapq.heapify(heap)
        while heap and len(chosen) < count:
            _, line = heapq.heappop(heap)
            least = line.pop()[1]
            same[least.worker] -= 1
            chosen.append(least)
            if line:
                heapq.heappush(heap, (rank(*line[-1]), line))
    return tuple(chosen)
