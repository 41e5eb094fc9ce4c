"""Placement: which worker gets a replica.

Dask reserves no resources for actors, so this module compares the resources that a worker declares with the
requests of the replicas placed on it. A worker must be available and allowed, and must have room; its host
must not have as many replicas as ``max_replicas_per_node`` allows. Among these, the worker with the fewest
replicas of the same backend wins, then the one whose host has the fewest; then one without a proxy or the
controller; then the one with the fewest replicas. With the option ``placement="PACK"``, the most replicas win
in each case. Ties are resolved by address, so the result is repeatable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from daskserve.amounts import shown, shown_size
from daskserve.control.records import BackendRecord, Change, ReplicaRecord
from daskserve.control.state import State
from daskserve.types import BackendTag, WorkerAddress, WorkerInfo

#: Tolerance for rounding errors, so that ten replicas with 0.1 CPU fit on 1 CPU.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources and workers that one replica needs."""

    backend: BackendTag
    amounts: Mapping[str, float]
    allowed_workers: tuple[str, ...] | None = None
    most_per_host: int | None = None
    is_packed: bool = False


class Ledger(Protocol):
    """The resources that replicas occupy; `daskserve.control.state.State` implements it."""

    def used(self, worker: WorkerAddress) -> Mapping[str, float]: ...

    def count_on(self, worker: WorkerAddress, backend: BackendTag | None = None) -> int: ...


class Trial:
    """The ledger of a state plus a change that has not been applied yet."""

    def __init__(self, state: State, change: Change) -> None:
        self._state = state
        self._used: dict[WorkerAddress, dict[str, float]] = {}
        self._counts: Counter[tuple[WorkerAddress, BackendTag | None]] = Counter()
        for key, record in change.items():
            kind, _, tag = key.partition("/")
            if kind != ReplicaRecord.KIND:
                continue
            old = state.replicas.get(tag)
            if old is not None and old.worker is not None:
                self.occupy(old.backend, old.worker, old.demand, -1)
            if isinstance(record, ReplicaRecord) and record.worker is not None:
                self.occupy(record.backend, record.worker, record.demand)

    def occupy(
        self, backend: BackendTag, worker: WorkerAddress, amounts: Mapping[str, float], count: int = 1
    ) -> None:
        """Add a replica on a worker; a ``count`` of -1 removes one."""
        used = self._used.setdefault(worker, dict(self._state.used(worker)))
        for name, amount in amounts.items():
            used[name] = used.get(name, 0) + count * amount
        self._counts[worker, backend] += count
        self._counts[worker, None] += count

    @contextmanager
    def without(self, replicas: Iterable[ReplicaRecord]) -> Iterator[None]:
        """Leave out some placed replicas inside a ``with`` block."""
        placed = [(each, each.worker) for each in replicas if each.worker is not None]
        for each, worker in placed:
            self.occupy(each.backend, worker, each.demand, -1)
        yield
        for each, worker in placed:
            self.occupy(each.backend, worker, each.demand)

    @contextmanager
    def filled(self, workers: Iterable[WorkerInfo], demand: Demand, count: int) -> Iterator[None]:
        """Add this many replicas, which have room, inside a ``with`` block."""
        known = list(workers)
        added = []
        for _ in range(count):
            worker = place(self, known, demand)
            if worker is not None:
                self.occupy(demand.backend, worker, demand.amounts)
                added.append(worker)
        yield
        for worker in added:
            self.occupy(demand.backend, worker, demand.amounts, -1)

    def used(self, worker: WorkerAddress) -> Mapping[str, float]:
        """Return the amounts that the replicas on a worker occupy, by resource."""
        return self._used[worker] if worker in self._used else self._state.used(worker)

    def count_on(self, worker: WorkerAddress, backend: BackendTag | None = None) -> int:
        """Return the number of replicas on a worker, of one backend or of all."""
        return self._state.count_on(worker, backend) + self._counts[worker, backend]


def capacity(worker: WorkerInfo) -> dict[str, float]:
    """Return a worker's amounts by resource: its threads as CPU, its memory, and its declared resources."""
    # Dask reports 0 for a worker without a memory limit.
    memory = float(worker.memory_bytes) or math.inf
    return {"CPU": float(worker.threads), "memory": memory, **worker.resources}


def has_room(ledger: Ledger, worker: WorkerInfo, amounts: Mapping[str, float]) -> bool:
    """Return whether a worker has these amounts left."""
    offered, used = capacity(worker), ledger.used(worker.address)
    return all(
        used.get(name, 0) + amount <= offered.get(name, 0) + TOLERANCE for name, amount in amounts.items()
    )


def is_allowed(worker: WorkerInfo, allowed: tuple[str, ...] | None) -> bool:
    """Return whether a backend limited to some workers (by address, name or host) may use this one."""
    return allowed is None or bool({worker.address, worker.name, worker.host} & set(allowed))


def place(
    ledger: Ledger,
    workers: Iterable[WorkerInfo],
    demand: Demand,
    avoid: Iterable[WorkerAddress] = (),
    *,
    mates: Mapping[WorkerAddress, int] | None = None,
    only: Collection[WorkerAddress] | None = None,
) -> WorkerAddress | None:
    """Return the best worker for one replica, or None if none has room.

    Parameters
    ----------
    avoid
        Workers to use only if no other fits: those of the controller and the proxies.
    mates
        The number of replicas of its gang on each worker, which count instead of all of its backend.
    only
        The workers that may be chosen; the others count as neighbors on their hosts.
    """
    known, avoided = list(workers), set(avoid)
    on_hosts = _count_on_hosts(ledger, known, demand)
    candidates = [
        worker
        for worker in known
        if worker.is_available
        and (only is None or worker.address in only)
        and is_allowed(worker, demand.allowed_workers)
        and (demand.most_per_host is None or on_hosts[worker.host] < demand.most_per_host)
        and has_room(ledger, worker, demand.amounts)
    ]
    if not candidates:
        return None
    sign = -1 if demand.is_packed else 1
    near = on_hosts
    if mates is not None:
        near = Counter()
        for worker in known:
            near[worker.host] += mates.get(worker.address, 0)

    def rank(worker: WorkerInfo) -> tuple[int, int, bool, int, str]:
        address = worker.address
        same = ledger.count_on(address, demand.backend) if mates is None else mates.get(address, 0)
        on_host = near[worker.host]
        return (sign * same, sign * on_host, address in avoided, sign * ledger.count_on(address), address)

    return min(candidates, key=rank).address


def room_for(
    ledger: Ledger,
    workers: Iterable[WorkerInfo],
    demand: Demand,
    most: int,
    only: WorkerAddress | None = None,
) -> int:
    """Return how many replicas fit on these workers together; ``most`` is enough.

    Parameters
    ----------
    only : str, optional
        Count the room of this worker alone; the others count as neighbors on its host.
    """
    known = list(workers)
    on_hosts = _count_on_hosts(ledger, known if demand.most_per_host is not None else (), demand)
    found = 0
    for worker in known:
        if found >= most or not worker.is_available or not is_allowed(worker, demand.allowed_workers):
            continue
        if only not in (None, worker.address):
            continue
        used = ledger.used(worker.address)
        free = {name: amount - used.get(name, 0) for name, amount in capacity(worker).items()}
        wanted = most - found
        if demand.most_per_host is not None:
            wanted = min(wanted, demand.most_per_host - on_hosts[worker.host])
        here = _fill(free, demand.amounts, wanted)
        on_hosts[worker.host] += here
        found += here
    return found


def _count_on_hosts(ledger: Ledger, workers: Iterable[WorkerInfo], demand: Demand) -> Counter[str]:
    """Return the number of the backend's replicas on these workers, by host."""
    counts: Counter[str] = Counter()
    for worker in workers:
        counts[worker.host] += ledger.count_on(worker.address, demand.backend)
    return counts


def demand_of(backend: BackendRecord) -> Demand:
    """Return the demand of a new replica."""
    allowed = backend.actor_options.workers
    return Demand(
        backend.tag,
        backend.actor_options.demand(),
        None if allowed is None else tuple(allowed),
        backend.config.max_replicas_per_node,
        backend.config.packs,
    )


def workers_needed(waiting: Iterable[Demand], workers: Iterable[WorkerInfo]) -> int:
    """Return the number of additional workers, like the existing ones, that the waiting replicas would fill.

    Replicas that do not fit on any of these workers, even if it is empty, do not count. Neither do those
    that wait for another host, unless each worker has a host of its own: others would join the hosts there
    are.
    """
    kinds = [(worker, capacity(worker)) for worker in workers]
    have_own_hosts = len({worker.host for worker, _ in kinds}) == len(kinds)
    filled: list[tuple[WorkerInfo, dict[str, float]]] = []
    demands: dict[tuple[Any, ...], Demand] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    for demand in waiting:  # all replicas of a backend need the same
        if demand.most_per_host is not None and not have_own_hosts:
            continue
        backend = None if demand.most_per_host is None else demand.backend
        key = (tuple(sorted(demand.amounts.items())), demand.allowed_workers, backend)
        demands[key] = demand
        counts[key] += 1
    for key, demand in demands.items():
        left = counts[key]
        for worker, free in filled:
            if _may_join(worker, demand):
                left -= _fill(free, demand.amounts, _most_on(demand, left))
        new = next(
            (
                each
                for each in kinds
                if _may_join(each[0], demand) and _fill(dict(each[1]), demand.amounts, 1)
            ),
            None,
        )
        while left and new is not None:
            free = dict(new[1])
            left -= _fill(free, demand.amounts, _most_on(demand, left))
            filled.append((new[0], free))
    return max(len(filled), int(bool(demands) and not kinds))


def _fill(free: dict[str, float], amounts: Mapping[str, float], count: int) -> int:
    """Subtract these amounts as often as they fit, at most ``count`` times; return the number of times."""
    most: float = count
    for name, amount in amounts.items():
        if amount > 0:
            most = min(most, (free.get(name, 0) + TOLERANCE) / amount)
    times = max(0, math.floor(most))
    for name, amount in amounts.items():
        free[name] = free.get(name, 0) - times * amount
    return times


def _most_on(demand: Demand, count: int) -> int:
    """Return how many of these replicas one host takes at most."""
    return count if demand.most_per_host is None else min(count, demand.most_per_host)


def _may_join(kind: WorkerInfo, demand: Demand) -> bool:
    # A new worker has another address and name, but may be on the same host.
    return demand.allowed_workers is None or kind.host in demand.allowed_workers


def explain(ledger: Ledger, workers: Iterable[WorkerInfo], demand: Demand) -> str:
    """Return the reason why no worker has room, with the numbers."""
    known = list(workers)
    if not known:
        return "the cluster has no workers that can hold replicas"
    allowed = [worker for worker in known if is_allowed(worker, demand.allowed_workers)]
    if not allowed:
        names = ", ".join(sorted(demand.allowed_workers or ()))
        return f"actor_options['workers'] allows only {names}, and none of these is in the cluster"
    usable = [worker for worker in allowed if worker.is_available]
    if not usable:
        return f"all {len(allowed)} allowed workers are paused or closing"
    if demand.most_per_host is not None:
        on_hosts = _count_on_hosts(ledger, known, demand)
        hosts = len({each.host for each in usable})
        usable = [each for each in usable if on_hosts[each.host] < demand.most_per_host]
        if not usable:
            limit = demand.most_per_host
            return f"max_replicas_per_node is {limit}, and each of the {hosts} usable hosts has as many"
    lacks = []
    for name, amount in sorted(demand.amounts.items()):
        free = [capacity(each).get(name, 0) - ledger.used(each.address).get(name, 0) for each in usable]
        if amount > max(free) + TOLERANCE:
            most = _amount(name, max(0.0, *free))
            lacks.append(f"{name} {_amount(name, amount)} (most free on one worker: {most})")
    wanted = ", ".join(f"{name} {_amount(name, amount)}" for name, amount in sorted(demand.amounts.items()))
    if lacks:
        return f"a replica needs {', '.join(lacks)}; {len(usable)} workers were looked at"
    return f"no single one of {len(usable)} workers has all of {wanted or 'nothing'} free"


def _amount(name: str, amount: float) -> str:
    return shown_size(amount) if name == "memory" else shown(amount)
