"""Gangs: replicas that start together or not at all, are replaced together, and end together. Pure.

The record of a replica names all replicas of its gang. A rollout counts gangs instead of replicas:
`daskserve.control.backend.rollout` gets one record for each gang. A replica without a gang is a gang of one.
Replicas with a placement group are placed like gangs: several bundles at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from daskserve.common.copying import replace
from daskserve.common.types import ReplicaState, ReplicaTag, WorkerInfo
from daskserve.control.backend import rollout
from daskserve.control.backend.rollout import Steps
from daskserve.control.observed.lifecycle import STOP_ORDER, WANTED_STATES
from daskserve.control.placement.eviction_order import EvictionCriteria
from daskserve.control.placement.placement import Demand, TentativeUsage, demand_of, room_for
from daskserve.control.records.bundles import bundles_of
from daskserve.control.records.records import BackendRecord, ReplicaRecord


def are_gangs(backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> bool:
    """Return whether a backend has gangs, or should have them."""
    return backend.gang_size > 1 or any(each.gang for each in replicas)


def broken(replicas: Mapping[ReplicaTag, ReplicaRecord]) -> list[ReplicaRecord]:
    """Return the replicas that must end because another replica of their gang has ended."""
    live = {tag for tag, each in replicas.items() if each.state in WANTED_STATES}
    return [replicas[tag] for tag in replicas if tag in live and not live.issuperset(replicas[tag].gang)]


def by_gang(replicas: Iterable[ReplicaRecord]) -> list[tuple[ReplicaRecord, ...]]:
    """Return replicas by gang, in order; a replica without a gang is a group of one."""
    found: dict[ReplicaTag, list[ReplicaRecord]] = {}
    for each in replicas:
        found.setdefault(each.gang[0] if each.gang else each.tag, []).append(each)
    return [tuple(each) for each in found.values()]


@dataclass(frozen=True, slots=True)
class _Gang:
    """Replicas that start and stop together, and the record that represents them in a rollout."""

    members: tuple[ReplicaRecord, ...]
    record: ReplicaRecord


def next_steps(
    backend: BackendRecord,
    replicas: Sequence[ReplicaRecord],
    *,
    max_surge: int,
    leaving: Collection[ReplicaTag],
    criteria: EvictionCriteria,
) -> Steps:
    """Return the next steps, as `daskserve.control.backend.rollout.next_steps` does, in whole gangs.

    ``max_surge`` and the option ``max_unavailable`` count gangs.
    """
    size = backend.gang_size
    wanted = backend.version_replicas // size
    max_unavailable = backend.config.unavailable(wanted)
    if not are_gangs(backend, replicas):
        return rollout.next_steps(
            wanted,
            backend.version,
            replicas,
            max_surge=max_surge,
            max_unavailable=max_unavailable,
            leaving=leaving,
            criteria=criteria,
        )
    units = {each.record.tag: each for each in _units(backend, replicas, leaving)}
    ongoing = {tag: _ongoing(unit.members, criteria.ongoing) for tag, unit in units.items()}
    steps = rollout.next_steps(
        wanted,
        backend.version,
        [each.record for each in units.values()],
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        leaving=leaving,
        criteria=replace(criteria, ongoing=ongoing),
    )
    stop = tuple(member for each in steps.stop for member in units[each.tag].members)
    return Steps(steps.start * size, stop)


def _units(
    backend: BackendRecord, replicas: Sequence[ReplicaRecord], leaving: Collection[ReplicaTag]
) -> Iterable[_Gang]:
    """Return the live replicas as units of at least the wanted gang size.

    Old gangs may have another size. Small ones are joined, so that they stop together. A gang that is larger
    than that counts as one unit.
    """
    old: list[tuple[ReplicaRecord, ...]] = []
    for members in by_gang(each for each in replicas if each.state in WANTED_STATES):
        if members[0].version == backend.version:
            yield _together(members, backend.version, leaving)
        elif old and len(old[-1]) < backend.gang_size:
            old[-1] += members
        else:
            old.append(members)
    if len(old) > 1 and len(old[-1]) < backend.gang_size:
        rest = old.pop()  # alone, it would count as a whole unit
        old[-1] += rest
    for members in old:
        yield _together(members, backend.version, leaving)


def _together(members: tuple[ReplicaRecord, ...], version: str, leaving: Collection[ReplicaTag]) -> _Gang:
    states = [each.state for each in members]
    is_old = members[0].version != version
    # An old gang serves while any of its replicas runs; a new gang serves once all of them run.
    serves = (any if is_old else all)(state is ReplicaState.RUNNING for state in states)
    state = ReplicaState.RUNNING if serves else min(states, key=STOP_ORDER.index)
    on_leaving = (each for each in members if each.tag in leaving)
    return _Gang(members, replace(next(on_leaving, members[0]), state=state))


def _ongoing(members: Iterable[ReplicaRecord], ongoing: Mapping[ReplicaTag, float]) -> float:
    return sum(ongoing.get(each.tag, 0.0) for each in members)


def demand_of_gang(backend: BackendRecord, gang: Sequence[ReplicaRecord]) -> Demand:
    """Return the resources that the waiting replicas of one gang need together."""
    bundles = tuple(amounts for each in gang for amounts in bundles_of(each))
    return replace(demand_of(backend), bundles=bundles, replicas=len(gang))


def to_drain(
    backend: BackendRecord,
    replicas: Sequence[ReplicaRecord],
    trial: TentativeUsage,
    workers: Sequence[WorkerInfo],
    demand: Demand,
    ongoing: Mapping[ReplicaTag, float],
) -> tuple[ReplicaRecord, ...]:
    """Return the old replicas to stop to make room for a new gang, or a replica with a placement group.

    This is `daskserve.control.backend.rollout.replicas_to_drain` for whole gangs on any workers.
    """
    if len(demand.bundles) == 1 and not any(each.gang or each.bundles for each in replicas):
        return rollout.replicas_to_drain(backend, replicas, trial, workers, demand, ongoing)
    old, is_useful = rollout.drainable(backend, replicas, trial, workers, demand)
    gangs = sorted(by_gang(old), key=lambda members: _ongoing(members, ongoing))
    if not is_useful:
        return next(iter(gangs), ())

    def is_enough(gangs: Iterable[tuple[ReplicaRecord, ...]]) -> bool:
        with trial.without(each for members in gangs for each in members):
            return room_for(trial, workers, demand, 1) == 1

    stop = [one] if (one := next((each for each in gangs if is_enough([each])), None)) else []
    if not stop:
        for members in gangs:
            stop.append(members)
            if is_enough(stop):
                break
        for members in reversed(stop[:-1]):
            rest = [each for each in stop if each is not members]
            if is_enough(rest):
                stop = rest
    return tuple(each for members in stop for each in members)
